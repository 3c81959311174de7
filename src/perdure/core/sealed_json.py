"""Small JSON files that carry their own digest, so that a flipped bit is noticed.

The object's ``digest`` is the xxh3-128 hex of the canonical JSON (sorted keys, no spaces, UTF-8) of
the object without ``digest``. ``format`` is the object's format version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import xxhash

from perdure.core.errors import DamagedError, FutureFormatError

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def encode(value: dict[str, Any], *, long: Mapping[str, str] | None = None) -> bytes:
    """Serialize with a digest.

    Args:
        value: Has an integer ``format``.
        long: Further fields, as canonical JSON already. With it the file is not indented for
            people but has a field a line, which takes a fraction of the time.
    """
    assert isinstance(value.get("format"), int)
    # As a reader will see it: JSON turns every key into text, which changes how keys sort.
    plain = cast("dict[str, Any]", json.loads(json.dumps(value)))
    if long is None:
        sealed = {**plain, "digest": _digest(plain)}
        return (json.dumps(sealed, indent=1, sort_keys=True) + "\n").encode()
    texts = {key: canonical(field) for key, field in plain.items()} | dict(long)
    fields = [f"{canonical(key)}:{texts[key]}" for key in sorted(texts)]
    digest = _digest_of("{" + ",".join(fields) + "}")
    return ("{" + ",\n ".join([*fields, f'"digest":"{digest}"']) + "}\n").encode()


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


def canonical(value: object) -> str:
    """JSON with sorted keys and without white space."""
    return _CANONICAL.encode(value)


def _digest(value: dict[str, Any]) -> str:
    return _digest_of(canonical(value))


def _digest_of(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
