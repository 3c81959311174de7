"""Many small components: one file, one sync, and everything else as if each had its own."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from ckpt_cases import flip, names, perdure
from grouped_cases import GroupedScript
from rank_cases import newest, on_all_ranks

from perdure.audit import audit_run
from perdure.checkpoint import compare
from perdure.checkpoint.team import Team
from perdure.storage import MemoryStorage, PosixStorage

GOLDEN = Path(__file__).parents[1] / "golden" / "grouped-v1"


def tensor_files(storage: MemoryStorage | PosixStorage) -> list[str]:
    files = newest(storage).manifest.files  # type: ignore[arg-type]
    return [path for path in files if path.endswith(".safetensors")]


def test_small_components_share_a_file_and_come_back_each_in_place() -> None:
    storage = MemoryStorage()
    assert GroupedScript(storage, 40).run(2).holds(2)
    assert tensor_files(storage) == ["small.safetensors"]
    assert "grouped" in newest(storage).manifest.features
    again = GroupedScript(storage, 40).run(5)
    assert again.engine.restored_from is not None
    assert again.holds(5)


@pytest.mark.parametrize(("small", "files"), [(31, 32), (32, 2)])
def test_few_small_ones_and_large_ones_keep_files_of_their_own(small: int, files: int) -> None:
    storage = MemoryStorage()
    script = GroupedScript(storage, small)
    script.engine.add("large", np.zeros((1 << 17) + 1))
    script.run(1)
    found = tensor_files(storage)
    assert len(found) == files
    assert "tensors/large.safetensors" in found
    assert ("grouped" in newest(storage).manifest.features) == (small == 32)


def test_a_checkpoint_says_the_same_whether_its_components_share_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, single = MemoryStorage(), MemoryStorage()
    GroupedScript(shared, 33).run(2)
    monkeypatch.setattr("perdure.checkpoint.shares.GROUP_FROM", 1000)
    GroupedScript(single, 33).run(2)
    assert len(tensor_files(single)) == 33
    one, other = newest(shared), newest(single)
    assert compare(one, other).equal
    for name in other.manifest.components:
        assert one.digest(name) == other.digest(name)
        assert b"".join(one.tensor_file(name)) == b"".join(other.tensor_file(name))
    again = GroupedScript(single, 33).run(3)
    assert again.holds(3)


def test_a_reader_is_gone_with_the_last_reference_to_it() -> None:
    """What it has mapped of a shared file is freed then, not when garbage is collected."""
    storage = MemoryStorage()
    GroupedScript(storage, 32).run(1)
    reader = newest(storage)
    for name in reader.manifest.components:
        reader.tensors(name)
    held = weakref.ref(reader)
    del reader
    assert held() is None


def test_exported_ones_are_plain_files_and_a_flipped_bit_sends_the_script_back(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    GroupedScript(PosixStorage(run), 32).run(3)
    assert audit_run(run).ok
    code, _, errors = perdure("ckpt", "export", run, tmp_path / "out")
    assert code == 0, errors
    exported = safetensors.numpy.load_file(tmp_path / "out" / "agents" / "7.safetensors")
    assert [array.tolist() for array in exported.values()] == [[[10, 10], [10, 10]]]
    file = run / "checkpoints" / names(run)[-1] / "small.safetensors"
    flip(file, file.stat().st_size - 1)
    code, said, _ = perdure("ckpt", "verify", run, "--json")
    assert code == 5
    assert "small.safetensors" in said
    again = GroupedScript(PosixStorage(run), 32).run(4)
    assert again.holds(4)
    assert again.engine.restored_from is not None
    ((_, reason),) = again.engine.restored_from.skipped
    assert "small.safetensors" in reason


def test_what_a_rank_has_for_itself_shares_a_file_too() -> None:
    storage = MemoryStorage()

    def run(team: Team, total: int) -> GroupedScript:
        return GroupedScript(storage, 32, process_group=team, per_rank=True).run(total)

    on_all_ranks(2, lambda team: run(team, 2))
    assert tensor_files(storage) == ["small.1-of-2.safetensors", "small.safetensors"]
    for script in on_all_ranks(2, lambda team: run(team, 4)):
        assert isinstance(script, GroupedScript), repr(script)
        assert script.engine.restored_from is not None
        assert script.holds(4)


def test_what_was_grouped_in_format_1_stays_readable(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    again = GroupedScript(PosixStorage(run), 32).run(4)
    assert again.engine.restored_from is not None
    assert again.engine.restored_from.step == 2
    assert again.holds(4)
    manifest = json.loads((GOLDEN / "checkpoints/step-00000002-1/manifest.json").read_text())
    assert manifest["components"]["agents/0"]["tensor_prefix"] == "agents/0:"
