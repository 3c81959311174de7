"""Nested plain data as tensors and small values, and back into live objects, in place.

Data are dictionaries, lists, tuples and deques of numbers, text, bytes, None, numpy arrays and
scalars and torch tensors, nested at will. Inside small values a mapping with one key that begins
with ``$`` stands for what msgpack has no word for:

    $tensor, $array, $scalar: name of the tensor     $tuple: items     $deque: [bound, items]
    $map: [[key, value], …] (keys that are not text)     $int: hexadecimal (beyond 64 bits)
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from perdure.core.components import Shard
from perdure.core.errors import ConfigError

_PLAIN = (str, bytes, bool, float, type(None))
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_INT64 = range(-(2**63), 2**64)
_PIECE = 8 << 20
DATA = "numbers, text, bytes, None, arrays, tensors, and dicts, lists, tuples and deques of them"


def torch_module() -> Any:
    """``torch`` if the script has imported it; nothing can be a tensor otherwise."""
    return sys.modules.get("torch")


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor."""
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def is_data(value: object) -> bool:
    """Whether :func:`split` can take it.

    Raises:
        ConfigError: It holds itself, or is nested deeper than can be followed.
    """
    try:
        return _is_data(value)
    except RecursionError:
        raise ConfigError(
            "holds itself, or is nested too deeply",
            where=f"a {type(value).__qualname__}",
            rule="data are a tree; Python follows some hundred levels of it",
            way_out="register a flatter copy",
        ) from None


def _is_data(value: object) -> bool:
    if isinstance(value, (*_PLAIN, int, np.ndarray, np.generic)) or is_tensor(value):
        return not _is_masked(value)
    if type(value) in _MAPPINGS:
        items = cast("Mapping[Any, Any]", value).items()
        return all(_is_data(key) and _is_data(item) for key, item in items)
    if type(value) in (list, tuple, deque):
        return all(_is_data(item) for item in cast("list[Any]", value))
    return False


def split(value: Any, tensors: dict[str, Any], path: str = "") -> Any:
    """``value`` as small values; arrays and tensors are put into ``tensors`` under their paths.

    Raises:
        ValueError: Something in it is not plain data; says where and what.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is int:
        return value if value in _INT64 else {"$int": hex(value)}
    if isinstance(value, np.generic):
        return _named("$scalar", np.asarray(value), path, tensors)
    if _is_masked(value):
        raise _not_data(value, path)
    if isinstance(value, np.ndarray):
        return _named("$array", cast("Any", value), path, tensors)
    if is_tensor(value):
        return _named("$tensor", value.detach(), path, tensors)
    if type(value) in _MAPPINGS:
        return _split_mapping(value, tensors, path)
    if type(value) in (list, tuple, deque):
        items = [split(item, tensors, _below(path, index)) for index, item in enumerate(value)]
        if type(value) is list:
            return items
        return {"$tuple": items} if type(value) is tuple else {"$deque": [value.maxlen, items]}
    raise _not_data(value, path)


def join(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo :func:`split`.

    Raises:
        ValueError: A tensor is missing, or a mark is unknown.
    """
    if isinstance(value, list):
        return [join(item, tensors) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    held = cast("dict[Any, Any]", value)
    mark = next(iter(held), "")
    if len(held) != 1 or not isinstance(mark, str) or not mark.startswith("$"):
        return {key: join(item, tensors) for key, item in held.items()}
    return _join_marked(mark, held[mark], tensors)


def taken_over(live: Any, stored: Any, path: str = "") -> Any:
    """What to hold instead of ``live`` to have ``stored``: ``live`` itself wherever it can be.

    Arrays, tensors, dictionaries, lists and deques stay the objects they are. A dictionary may have
    grown since it was made, and so may an array along its first axis. Inside of something, a
    read-only array is replaced.

    Raises:
        ValueError: A key of the live dictionary is not stored, or a kind, shape or type differs.
    """
    if isinstance(live, np.ndarray) and isinstance(stored, np.ndarray):
        return _into_array(cast("Any", live), cast("Any", stored), path)
    if is_tensor(live) and is_tensor(stored):
        return _into_array(live, stored, path)
    if isinstance(live, dict) and isinstance(stored, dict):
        return _into_mapping(cast("dict[Any, Any]", live), cast("dict[Any, Any]", stored), path)
    if type(live) is list and isinstance(stored, list):
        items = cast("list[Any]", stored)
        live[:] = _taken_items(cast("list[Any]", live), items, path)
        return live
    if type(live) is deque and isinstance(stored, deque):
        fresh = cast("deque[Any]", stored)
        held = cast("deque[Any]", live)
        if held.maxlen != fresh.maxlen:
            raise ValueError(f"{path or 'it'} holds {held.maxlen} here and {fresh.maxlen} there")
        items = _taken_items(list(held), list(fresh), path)
        held.clear()
        held.extend(items)
        return held
    if _is_container(live) and not isinstance(stored, type(live)):
        kinds = type(live).__name__, type(stored).__name__
        raise ValueError(f"{path or 'it'} is a {kinds[0]} here and a {kinds[1]} in the checkpoint")
    return copy.deepcopy(stored)


def differences(stored: Any, live: Any, path: str = "") -> list[str]:
    """Where small values or tensors that were just loaded are not those that were stored.

    What the live state has beyond the stored one does not count.
    """
    if isinstance(stored, Mapping) and isinstance(live, Mapping):
        found: list[str] = []
        held = cast("Mapping[Any, Any]", live)
        for key, item in cast("Mapping[Any, Any]", stored).items():
            place = _below(path, key)
            found += differences(item, held[key], place) if key in held else [f"{place} is gone"]
        return found
    if isinstance(stored, list | tuple) and isinstance(live, list | tuple):
        first, second = cast("list[Any]", stored), cast("list[Any]", live)
        if len(first) != len(second):
            return [f"{path} has {len(second)} items instead of {len(first)}"]
        pairs = enumerate(zip(first, second, strict=True))
        return [text for i, (a, b) in pairs for text in differences(a, b, _below(path, i))]
    return [] if _same(stored, live) else [f"{path} is {_short(live)} instead of {_short(stored)}"]


def local(tensor: Any) -> Any:
    """What this rank has of a tensor: its part of one that is spread over ranks, else all of it."""
    if isinstance(tensor, Shard):
        return tensor.data
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_bytes(tensor: Any) -> np.ndarray[Any, Any]:
    """The bytes of an array or tensor, wherever it is, as a flat uint8 array."""
    tensor = local(tensor)
    if is_tensor(tensor):
        torch = torch_module()
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    stored = tensor.dtype.newbyteorder("<")
    return np.ascontiguousarray(tensor, stored).reshape(-1).view(np.uint8)


def _named(mark: str, tensor: Any, path: str, tensors: dict[str, Any]) -> dict[str, str]:
    name = path or "value"
    if name in tensors:
        raise ValueError(f"two parts are called {name}")
    tensors[name] = tensor
    return {mark: name}


def _split_mapping(value: Mapping[Any, Any], tensors: dict[str, Any], path: str) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    items = [(key, split(item, tensors, _below(path, key))) for key, item in value.items()]
    if plain:
        return dict(items)
    # A key may hold an element of numpy; that of its value has the name of the place itself.
    keys = [split(key, tensors, f"{_below(path, key)}/$key") for key in value]
    return {"$map": [[key, item] for key, (_, item) in zip(keys, items, strict=True)]}


def _join_marked(mark: str, held: Any, tensors: Mapping[str, Any]) -> Any:
    if mark in ("$tensor", "$array", "$scalar"):
        if held not in tensors:
            raise ValueError(f"tensor {held} is missing")
        tensor = tensors[held]
        if mark == "$scalar":
            return tensor[()]
        if mark == "$tensor" and not is_tensor(tensor):
            torch = torch_module()
            if torch is None:
                raise ValueError(f"{held} is a torch tensor, and torch is not imported")
            return torch.as_tensor(tensor)
        return tensor
    if mark == "$tuple":
        return tuple(join(item, tensors) for item in held)
    if mark == "$deque":
        return deque((join(item, tensors) for item in held[1]), held[0])
    if mark == "$map":
        return {join(key, tensors): join(item, tensors) for key, item in held}
    if mark == "$int":
        return int(held, 16)
    raise ValueError(f"{mark} is no mark of plain data")


def _into_array(live: Any, stored: Any, path: str) -> Any:
    same_type = _element_type(live) == _element_type(stored)
    same_shape = live.shape == stored.shape
    if same_type and same_shape and not is_read_only(live):
        if is_tensor(live):
            with torch_module().no_grad():
                live.copy_(stored)
        else:
            np.copyto(live, stored)
        return live
    grows = path and live.ndim and live.ndim == stored.ndim and live.shape[1:] == stored.shape[1:]
    if same_type and (grows or (path and same_shape)):
        return stored.to(live.device) if is_tensor(live) else stored
    raise ValueError(
        f"{path or 'it'} is {tuple(stored.shape)} {stored.dtype} in the checkpoint and "
        f"{tuple(live.shape)} {live.dtype} here"
    )


def _element_type(value: Any) -> Any:
    """Whatever its byte order, in which files do not differ."""
    return value.dtype if is_tensor(value) else value.dtype.newbyteorder("<")


def is_read_only(value: Any) -> bool:
    """Whether nothing can be copied into it: another library's buffer, an expanded tensor."""
    if is_tensor(value):
        dense = value.layout is torch_module().strided
        strides = zip(value.stride(), value.shape, strict=True) if dense else ()
        return any(not stride and size > 1 for stride, size in strides)
    return isinstance(value, np.ndarray) and not value.flags.writeable


def _not_data(value: object, path: str) -> ValueError:
    place = f" at {path}" if path else ""
    return ValueError(f"holds a {type(value).__module__}.{type(value).__qualname__}{place}")


def _is_masked(value: object) -> bool:
    """Whether it is an array with a mask, which no file would hold."""
    return isinstance(value, np.ma.MaskedArray)


def _into_mapping(live: dict[Any, Any], stored: dict[Any, Any], path: str) -> dict[Any, Any]:
    missing = [str(key) for key in live if key not in stored]
    if missing:
        raise ValueError(f"{_below(path, missing[0])} is not in the checkpoint")
    for key, value in stored.items():
        place = _below(path, key)
        live[key] = taken_over(live[key], value, place) if key in live else copy.deepcopy(value)
    return live


def _taken_items(live: list[Any], stored: list[Any], path: str) -> list[Any]:
    return [
        taken_over(live[i], item, _below(path, i))
        if i < len(live) and _is_container(live[i])
        else copy.deepcopy(item)
        for i, item in enumerate(stored)
    ]


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list | deque | np.ndarray) or is_tensor(value)


def _below(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _same(stored: Any, live: Any) -> bool:
    arrays = [isinstance(value, np.ndarray | Shard) or is_tensor(value) for value in (stored, live)]
    if all(arrays):
        return tuple(stored.shape) == tuple(live.shape) and _equal_bytes(
            as_bytes(stored), as_bytes(live)
        )
    if isinstance(stored, float) and isinstance(live, float) and stored != stored:
        return live != live
    return not any(arrays) and bool(stored == live)


def _equal_bytes(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """In pieces: a comparison at once would take as much memory again."""
    return one.size == other.size and all(
        np.array_equal(one[start : start + _PIECE], other[start : start + _PIECE])
        for start in range(0, one.size, _PIECE)
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
