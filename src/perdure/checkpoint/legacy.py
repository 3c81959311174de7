"""Objects that nothing but pickle can store: the one place where anything is pickled.

Both sides have to ask for it: who saves (``legacy=True``) and who loads (``allow_legacy=True``).
What is unpickled has the checksum that the manifest says, and the manifest is the one that was
committed; neither protects from whoever can write both.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError

PROTOCOL = 5
SELF = "self"
"""Stands for the registered object inside its own pickle, so that it is found again in place."""


class _Plain:
    """An object that holds nothing but its attributes."""


class LegacyComponent:
    """An object of any class, pickled when saved, filled in place when loaded.

    The object's state is what ``__getstate__`` gives, or its attributes, or the items of a dict,
    list or set. Attributes that refer to the object itself still do after loading.

    Args:
        held: The live object.
        name: What errors call it.

    Raises:
        ConfigError: It cannot be filled in place.
    """

    schema_version = 1

    def __init__(self, held: object, name: str) -> None:
        if not _fillable(held):
            raise ConfigError(
                f"a {_class_name(held)} cannot be filled in place",
                where=f"component {name}",
                rule="others may refer to the object, so it is never replaced by another",
                way_out="put it into a dict, or give it __getstate__ and __setstate__",
            )
        self._held = held
        self._name = name

    def state(self) -> ComponentState:
        """The pickle.

        Raises:
            ConfigError: The object cannot be pickled.
        """
        data = io.BytesIO()
        pickler = _Pickler(data, self._held)
        try:
            pickler.dump((_class_name(self._held), _contents(self._held)))
        except Exception as error:
            raise ConfigError(
                f"a {_class_name(self._held)} cannot be pickled ({type(error).__name__}: {error})",
                where=f"component {self._name}",
                rule="a part registered with legacy=True is pickled, all of it",
                way_out="leave out what cannot be pickled in its __getstate__",
            ) from error
        return ComponentState(legacy=data.getvalue())

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Unpickle and fill the object. Runs code that the pickle names.

        Raises:
            ValueError: Not the pickle of an object of this class.
        """
        del schema_version
        if state.legacy is None:
            raise ValueError("it was stored without a pickle")
        try:
            stored, contents = _Unpickler(io.BytesIO(state.legacy), self._held).load()
        except Exception as error:
            raise ValueError(f"cannot be unpickled: {type(error).__name__}: {error}") from error
        if stored != _class_name(self._held):
            raise ValueError(f"a {stored} was stored, a {_class_name(self._held)} is registered")
        _fill(self._held, contents)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, held: object) -> None:
        super().__init__(file, PROTOCOL)
        self._held = held

    def persistent_id(self, obj: Any) -> str | None:
        return SELF if obj is self._held else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, held: object) -> None:
        super().__init__(file)
        self._held = held

    def persistent_load(self, pid: Any) -> object:
        if pid != SELF:
            raise pickle.UnpicklingError(f"refers to {pid!r}")
        return self._held


def _fillable(held: object) -> bool:
    kind = type(held)
    if kind in (dict, list, set):
        return True
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        # It says how to make another one, not how to fill this one.
        return False
    custom = kind.__getstate__ is not object.__getstate__ and hasattr(held, "__setstate__")
    # Slots, and memory of types written in C, make instances larger than attributes alone do.
    plain = kind.__basicsize__ == _Plain.__basicsize__ and not kind.__itemsize__
    return custom or (plain and hasattr(held, "__dict__"))


def _contents(held: Any) -> Any:
    # A copy of a container: the container itself stands for the registered object.
    return type(held)(held) if type(held) in (dict, list, set) else held.__getstate__()


def _fill(held: Any, contents: Any) -> None:
    kind, set_state = _class_name(held), getattr(held, "__setstate__", None)
    if kind == "builtins.list":
        held[:] = contents
    elif kind in ("builtins.dict", "builtins.set"):
        held.clear()
        held.update(contents)
    elif set_state is not None:
        set_state(contents)
    else:
        held.__dict__.clear()
        held.__dict__.update(contents or {})


def _class_name(held: object) -> str:
    return f"{type(held).__module__}.{type(held).__qualname__}"
