"""Errors of the store on their way to another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.core.errors import PerdureError
from perdure.experience.remote.frames import MALFORMED, BadFrameError, FrameType, make_frame

Refusal = PerdureError | TypeError | ValueError
"""What an append raises, or its future."""
REFUSALS = (PerdureError, TypeError, ValueError)

_CLASSES: dict[str, type[PerdureError]] = {
    cls.__name__: cls for cls in (PerdureError, *PerdureError.__subclasses__())
}
_PLAIN: dict[str, type[TypeError | ValueError]] = {"TypeError": TypeError, "ValueError": ValueError}


def refusal_frame(error: Refusal) -> bytearray:
    """A frame, without its number, that carries the class and the parts of an error."""
    if isinstance(error, PerdureError):
        parts = (error.what, error.where, error.rule, error.way_out)
        name = type(error).__name__
    else:
        parts = (str(error), "", "", "")
        name = "TypeError" if isinstance(error, TypeError) else "ValueError"
    fields = dict(zip(("what", "where", "rule", "way_out"), parts, strict=True))
    return make_frame(FrameType.REFUSED, {"error": name, **fields})


def read_refusal(fields: Mapping[str, Any]) -> Refusal:
    """The error in a frame; one of an unknown class is a ``PerdureError``.

    Raises:
        BadFrameError: A part is missing.
    """
    try:
        name, what = fields["error"], fields["what"]
        if name in _PLAIN:
            return _PLAIN[name](what)
        cls = _CLASSES.get(name, PerdureError)
        return cls(what, where=fields["where"], rule=fields["rule"], way_out=fields["way_out"])
    except MALFORMED as error:
        raise BadFrameError(f"a refusal cannot be read: {error}") from error
