"""Small JSON files that carry their own digest, so that a flipped bit is noticed.

The object's ``digest`` is the xxh3-128 hex of the canonical JSON (sorted keys, no spaces, UTF-8) of
the object without ``digest``. ``format`` is the object's format version.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import xxhash

from perdure.core.errors import DamagedError, FutureFormatError


def encode(value: dict[str, Any], *, indented: bool = True) -> bytes:
    """Serialize with a digest.

    Args:
        value: Has an integer ``format``.
        indented: For people; otherwise a field a line, which takes a third of the time.
    """
    assert isinstance(value.get("format"), int)
    # As a reader will see it: JSON turns every key into text, which changes how keys sort.
    plain = cast("dict[str, Any]", json.loads(json.dumps(value)))
    sealed = {**plain, "digest": _digest(plain)}
    if indented:
        return (json.dumps(sealed, indent=1, sort_keys=True) + "\n").encode()
    fields = (
        f" {json.dumps(key)}: {json.dumps(sealed[key], sort_keys=True)}" for key in sorted(sealed)
    )
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()


def decode(
    data: bytes, *, where: str, newest_format: int, fields: Sequence[str] = ()
) -> dict[str, Any]:
    """Read :func:`encode` back.

    Args:
        data: The file's bytes.
        where: Its path, for messages.
        newest_format: Highest format the caller reads.
        fields: What an object of this kind has; a sealed object of another kind is damage too.

    Raises:
        DamagedError: Not JSON, no digest, the digest does not match, or a field is missing.
        FutureFormatError: ``format`` is above ``newest_format``.
    """
    try:
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        sealed = cast("dict[str, Any]", value)
        digest = sealed.pop("digest")
        damaged = digest != _digest(sealed)
    except (ValueError, KeyError, RecursionError) as error:
        raise DamagedError(
            f"not a sealed JSON object ({error})", where=where, way_out="restore it from a copy"
        ) from error
    if damaged:
        raise DamagedError("digest does not match", where=where, way_out="restore it from a copy")
    if not isinstance(sealed.get("format"), int) or sealed["format"] > newest_format:
        raise FutureFormatError(
            f"format {sealed.get('format')} is newer than {newest_format}",
            where=where,
            way_out="use the perdure version that wrote it, or a newer one",
        )
    missing = [field for field in fields if field not in sealed]
    if missing:
        raise DamagedError(
            f"lacks {', '.join(missing)}",
            where=where,
            rule="it must be the file that was written under this name",
            way_out="restore it from a copy",
        )
    return sealed


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode())
