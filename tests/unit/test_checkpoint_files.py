"""Registry, file images and restoring by name."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from perdure.checkpoint import (
    ArraysComponent,
    Checkpointer,
    CheckpointReader,
    Kind,
    MemoryLedger,
    Registry,
    StagedInfo,
    ValuesComponent,
    restore,
)
from perdure.checkpoint.arena import Arena, materialize, spec_of
from perdure.checkpoint.layout import ALIGNMENT, TensorSpec, parse_header, plan
from perdure.checkpoint.registry import RESTORE_ORDER
from perdure.core.clock import SystemClock
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError, FutureFormatError
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.storage import MemoryStorage

ONE = IncarnationNumber(1)
TYPES = ["?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", "<c8"]


def image_of(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    layout = plan({"f": {name: spec_of(array) for name, array in arrays.items()}})
    arena = Arena()
    arena.fill(layout, {"f": arrays})
    assert layout.images[0].data_offset % ALIGNMENT == 0
    return bytes(arena.file_bytes(layout.images[0]))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.sampled_from(TYPES).flatmap(
            lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
        ),
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_arrays_come_back_here_and_in_the_safetensors_library(
    arrays: dict[str, np.ndarray[Any, Any]],
) -> None:
    data = image_of(arrays)
    start, places = parse_header(data, file_size=len(data))
    raw = np.frombuffer(data, np.uint8)
    theirs = safetensors.numpy.load(data)
    assert theirs.keys() == arrays.keys() == {place.name for place in places}
    for place in places:
        ours = materialize(raw[start + place.start : start + place.end], place.spec)
        original = arrays[place.name]
        assert ours.tobytes() == theirs[place.name].tobytes() == original.tobytes()
        assert ours.shape == theirs[place.name].shape == original.shape
        assert ours.dtype == theirs[place.name].dtype == original.dtype
        assert place.start % max(1, original.itemsize) == 0


@pytest.mark.parametrize("rows", [3, 10_000])
def test_strided_and_foreign_ended_arrays_are_stored_in_order(rows: int) -> None:
    grid = np.arange(rows * 4, dtype=np.int32).reshape(rows, 4)
    arrays = {"turned": grid.T, "skipping": grid[:, ::2], "big": grid.astype(">i4")}
    theirs = safetensors.numpy.load(image_of(arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(theirs[name], array)
        assert theirs[name].dtype == np.dtype("<i4")


@pytest.mark.parametrize("rows", [3, 70_000])
def test_arrays_that_are_cut_in_ways_of_their_own_are_stored_whole(rows: int) -> None:
    grid = np.arange(rows * 4, dtype=np.float64).reshape(rows, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrix = np.matrix(grid)
    masked = np.ma.masked_array(grid, mask=grid > 5)
    theirs = safetensors.numpy.load(image_of({"matrix": matrix, "masked": masked}))
    np.testing.assert_array_equal(theirs["matrix"], grid)
    np.testing.assert_array_equal(theirs["masked"], grid)


def test_a_long_header_moves_the_data_to_the_next_multiple() -> None:
    arrays = {f"tensor-{index:04d}": np.full(3, index, np.int16) for index in range(500)}
    data = image_of(arrays)
    start, places = parse_header(data, file_size=len(data))
    assert start > ALIGNMENT
    assert start % ALIGNMENT == 0
    assert len(places) == 500


def test_images_in_one_arena_do_not_overlap_and_the_arena_is_reused() -> None:
    layout = plan({f"f{index}": {"a": TensorSpec("F64", (index * 100,))} for index in range(4)})
    ends = [image.arena_offset + image.size for image in layout.images]
    starts = [image.arena_offset for image in layout.images]
    assert all(start >= end for end, start in zip(ends, starts[1:], strict=False))
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert math.ceil(ends[-1] / ALIGNMENT) * ALIGNMENT == layout.size
    arena = Arena()
    arena.fit(layout.size)
    held = arena.nbytes
    arena.fit(10)
    assert arena.nbytes == held >= layout.size


@pytest.mark.parametrize(
    "entries",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"a": {"shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_a_header_that_does_not_fit_is_refused(entries: Any) -> None:
    text = json.dumps(entries).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(ValueError, match="tensor"):
        parse_header(data, file_size=len(data))


@pytest.mark.parametrize("data", [b"", b"\1", (99).to_bytes(8, "little") + b"{}"])
def test_a_cut_header_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        parse_header(data, file_size=len(data))


@pytest.mark.parametrize("name", ["", "a//b", "/a", "a/", "..", "a/../b", "a b", "a.b", "ä"])
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        Registry().register(name, ValuesComponent({}), kind="values")


def test_duplicates_and_unknown_kinds_are_refused() -> None:
    registry = Registry()
    registry.register("agents/0/policy", ArraysComponent({}), kind="model")
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("agents/0/policy", ArraysComponent({}), kind="tensors")
    with pytest.raises(ConfigError, match="not a kind"):
        registry.register("x", ArraysComponent({}), kind="weights")  # type: ignore[arg-type]


def test_components_are_restored_in_the_order_of_their_kinds() -> None:
    loaded: list[str] = []

    class Noting(ValuesComponent):
        def __init__(self, name: str) -> None:
            super().__init__({"name": name})

        def load(self, state: ComponentState, schema_version: int) -> None:
            super().load(state, schema_version)
            loaded.append(self.values["name"])

    registry = Registry()
    for kind in reversed(RESTORE_ORDER):
        registry.register(f"{kind}/b", Noting(f"{kind}/b"), kind=kind)
        registry.register(f"{kind}/a", Noting(f"{kind}/a"), kind=kind)
    engine, _ = saved(registry)
    engine.restore(engine.choose(engine.ledger.committed()))
    kinds: tuple[Kind, ...] = ("model", "optimizer", "scheduler", "experience", "counters", "rng")
    order = [loaded.index(f"{kind}/b") for kind in kinds]
    assert order == sorted(order)
    assert loaded.index("model/b") < loaded.index("model/a")
    assert loaded[-1] == "rng/a"


def saved(registry: Registry, storage: MemoryStorage | None = None) -> tuple[Checkpointer, Any]:
    """An engine whose checkpoint 1 is committed."""
    storage = storage or MemoryStorage()
    engine = Checkpointer(
        storage,
        registry=registry,
        ledger=MemoryLedger(),
        clock=SystemClock(),
        faults=NoFaults(),
        events=ignore_events,
    )
    info = StagedInfo(LogPosition(ONE, 0, 1), {"global_step": 1}, {"run_id": "r"}, "g", "c", "d")
    assert engine.stage(CheckpointName("train", 1, ONE), info=info, must=True)
    engine.close()
    return engine, engine.choose(engine.ledger.committed())


def test_folders_follow_kinds_and_names_nest() -> None:
    registry = Registry()
    array = {"w": np.ones(2)}
    registry.register("agents/0/policy", ArraysComponent(array), kind="model")
    registry.register("agents/0/adam", ArraysComponent(array), kind="optimizer")
    registry.register("statistics", ArraysComponent(array), kind="tensors")
    registry.register("counters", ValuesComponent({}), kind="counters")
    _, choice = saved(registry)
    assert sorted(choice.manifest.files) == [
        "experience.msgpack",
        "model/agents/0/policy.safetensors",
        "optimizer/agents/0/adam.safetensors",
        "state.msgpack",
        "tensors/statistics.safetensors",
    ]
    assert choice.manifest.components["counters"].tensor_file == ""


class Parts:
    """Two arrays and a counter, and the registry over them."""

    def __init__(self, *names: str, required: bool = True, schema_version: int = 1) -> None:
        self.arrays = {name: {"w": np.zeros(2)} for name in names}
        self.registry = Registry()
        for name, arrays in self.arrays.items():
            component = ArraysComponent(arrays, schema_version=schema_version)
            self.registry.register(name, component, kind="model", required=required)


def stored(storage: MemoryStorage, *names: str) -> Any:
    parts = Parts(*names)
    for arrays in parts.arrays.values():
        arrays["w"][:] = 5
    return saved(parts.registry, storage)[1]


def test_weights_alone_can_be_loaded() -> None:
    storage = MemoryStorage()
    choice = stored(storage, "policy", "value", "optimizer")
    parts = Parts("policy", "value")
    restore(storage, choice, parts.registry.entries(), faults=NoFaults(), only=["policy"])
    np.testing.assert_array_equal(parts.arrays["policy"]["w"], [5, 5])
    np.testing.assert_array_equal(parts.arrays["value"]["w"], [0, 0])


def test_a_selection_names_what_exists() -> None:
    storage = MemoryStorage()
    choice = stored(storage, "policy", "value")
    entries = Parts("policy", "value").registry.entries()
    with pytest.raises(ConfigError, match="did you mean 'policy'"):
        restore(storage, choice, entries, faults=NoFaults(), only=["polcy"])


def test_a_stored_component_is_never_dropped_silently() -> None:
    storage = MemoryStorage()
    choice = stored(storage, "policy", "value")
    with pytest.raises(ConfigError, match="not registered: value"):
        restore(storage, choice, Parts("policy").registry.entries(), faults=NoFaults())
    assert not storage.exists("restoring.json")


def test_a_required_component_that_was_not_stored_is_refused_an_optional_one_left() -> None:
    storage = MemoryStorage()
    choice = stored(storage, "policy")
    with pytest.raises(ConfigError, match="lacks required components: value"):
        restore(storage, choice, Parts("policy", "value").registry.entries(), faults=NoFaults())
    parts = Parts("policy", "value", required=False)
    restore(storage, choice, parts.registry.entries(), faults=NoFaults())
    np.testing.assert_array_equal(parts.arrays["policy"]["w"], [5, 5])


def test_a_state_that_does_not_fit_names_its_component() -> None:
    storage = MemoryStorage()
    choice = stored(storage, "policy")
    parts = Parts("policy")
    parts.arrays["policy"]["w"] = np.zeros(3)
    with pytest.raises(ConfigError, match=r"component policy: .*\(3,\)"):
        restore(storage, choice, parts.registry.entries(), faults=NoFaults())


def test_schema_versions_older_are_handed_over_newer_refused() -> None:
    storage = MemoryStorage()
    parts = Parts("policy", schema_version=2)
    choice = saved(parts.registry, storage)[1]
    with pytest.raises(FutureFormatError, match="schema version 2 is newer than 1"):
        restore(storage, choice, Parts("policy").registry.entries(), faults=NoFaults())
    newer = Parts("policy", schema_version=3)
    with pytest.raises(ConfigError, match="schema version 2, expected 3"):
        restore(storage, choice, newer.registry.entries(), faults=NoFaults())


def test_a_reader_gives_every_part_without_components() -> None:
    storage = MemoryStorage()
    registry = Registry()
    values = {"n": 3, "x": 0.1, "text": "ä", "raw": b"\0", "list": [1, None, True], 7: "seven"}
    registry.register("counters", ValuesComponent(values), kind="counters")  # type: ignore[arg-type]
    choice = saved(registry, storage)[1]
    reader = CheckpointReader(storage, choice.manifest)
    assert reader.values() == {"counters": values}
    assert reader.tensors("counters") == {}
    assert reader.experience() == {}
