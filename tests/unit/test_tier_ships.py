"""Shipping and pulling one run: what arrives, what is stored twice, what leaves, what is told."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from pathlib import Path

import pytest
from tier_cases import (
    OPTIONS,
    RUN_ID,
    WAIT_S,
    BreakingObjects,
    Said,
    TieredRun,
    check_no_leftovers,
    context,
    experience_of,
    memory_objects,
    resumed_elsewhere,
)

from perdure.audit import audit_run
from perdure.checkpoint.tier import (
    ObstoreObjects,
    RemoteUnavailableError,
    pull,
    read_head,
)
from perdure.checkpoint.tier.head import decode_head
from perdure.checkpoint.tier.objects import Bytes
from perdure.core import sealed_json
from perdure.core.clock import ManualClock
from perdure.core.errors import (
    ConfigError,
    DamagedError,
    FencedError,
    FutureFormatError,
    NothingToResumeError,
    RunBusyError,
)
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.storage import MemoryStorage, PosixStorage

MODEL = "model/policy.safetensors"


def fetch(objects: ObstoreObjects, storage: MemoryStorage | None = None, **more: object) -> str:
    """Pull; returns the checkpoint that came."""
    into = MemoryStorage() if storage is None else storage
    return pull(into, objects, context=context(), **more).checkpoint  # type: ignore[arg-type]


def pieces(objects: ObstoreObjects, directory: str, file: str = MODEL) -> list[str]:
    return sorted(objects.list(f"checkpoints/{directory}/{file}"))


def test_an_empty_machine_gets_the_checkpoint_and_every_acknowledged_record() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    run.train_and_save()
    run.push(objects)
    for _ in range(5):
        run.train()
    newest = run.train_and_save()
    run.train()
    head = run.push(objects)
    assert head.target is not None
    assert head.target.directory == newest
    assert len(head.log) > 2, "several segments"
    other = resumed_elsewhere(objects)
    assert other.restored_step == 7
    assert other.step == 8
    assert other.claimed.run.run_id == RUN_ID
    assert experience_of(other) == experience_of(TieredRun(run.storage, take_over=True))
    other.train_and_save()
    assert other.push(objects).incarnation == 2
    assert resumed_elsewhere(objects).restored_step == 9


def test_every_byte_of_the_log_is_shipped_once() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    for _ in range(6):
        run.train()
        run.push(objects)
    shipped = sum(objects.list("log").values())
    assert shipped == sum(read_head(objects).log.values())
    assert shipped == sum(run.storage.size(f"log/{name}") for name in run.storage.list("log"))


def test_what_is_there_is_not_stored_again() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    run.train_and_save()
    run.push(objects)
    before = {key: objects.read_tagged(key)[1] for key in objects.list("")}
    run.push(objects)
    assert {key: objects.read_tagged(key)[1] for key in objects.list("")} == before


def damage_in(run: Path) -> list[str]:
    """What the audit misses; the log of these runs is no trainer's."""
    found = audit_run(run).findings
    return [str(finding) for finding in found if finding.severity == "damage"]


@pytest.mark.parametrize("which", [0, 1])
def test_what_was_not_fetched_is_told_until_it_has_left_the_store(
    which: int, tmp_path: Path
) -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    for _ in range(3):
        run.train_and_save()
        head = run.push(objects)
    storage = PosixStorage(tmp_path)
    only = head.checkpoints[which].directory
    pull(storage, objects, context=context(), checkpoint=only)
    assert storage.list("checkpoints") == [only]
    assert not damage_in(tmp_path)
    again = TieredRun(storage, clock=ManualClock(2_000_000.0))
    assert again.restored_step == which + 2
    again.engine.sweep()
    assert not damage_in(tmp_path)
    for _ in range(3):
        again.train_and_save()
        again.push(objects)
    again.close()
    last = TieredRun(storage, clock=ManualClock(3_000_000.0))
    last.engine.sweep()
    assert not storage.exists("pulled.json")
    assert not damage_in(tmp_path)
    last.close()


@pytest.mark.parametrize(
    ("victim", "harm"), [(0, "flipped"), (1, "flipped"), (1, "missing")], ids=str
)
def test_a_manifest_that_is_damaged_in_the_store_leaves_no_segment_behind_for_good(
    victim: int, harm: str
) -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    for _ in range(4):
        run.train_and_save()
        head = run.push(objects)
    pushed = [one.directory for one in head.checkpoints]
    key = f"checkpoints/{pushed[victim]}/manifest.json"
    if harm == "missing":
        objects.delete([key])
    else:
        data = bytearray(objects.read(key))
        data[data.index(b'"versions"') + 2] ^= 1
        objects.overwrite(key, bytes(data))
    run.train_and_save()
    head = run.push(objects)
    assert (pushed[0] in head.dropped) == (harm == "missing")
    for _ in range(2):
        run.train_and_save()
        run.push(objects)
    check_no_leftovers(objects)


def test_an_interrupted_upload_stores_only_the_missing_pieces() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    newest = run.train_and_save()
    breaking = BreakingObjects(objects)
    run.push(breaking)
    first = [key for action, key in breaking.requests if action == "create"]
    third = first.index(pieces(objects, newest)[2])
    other = memory_objects()
    stops = BreakingObjects(other)
    at = [number for number, (action, _) in enumerate(breaking.requests) if action == "create"]
    stops.breaks = {
        number: (RemoteUnavailableError("down"), False)
        for number in range(at[third], at[third] + OPTIONS.retry.attempts)
    }
    one_at_a_time = dataclasses.replace(OPTIONS, parallel=1)
    with pytest.raises(RemoteUnavailableError):
        run.push(stops, options=one_at_a_time)
    assert stops.broke == OPTIONS.retry.attempts
    there = pieces(other, newest)
    assert len(there) == 2
    again = BreakingObjects(other)
    run.push(again, options=one_at_a_time)
    stored = [key for action, key in again.requests if action == "create"]
    assert not set(there) & set(stored)
    assert resumed_elsewhere(other).restored_step == 1


def test_an_upload_goes_on_after_the_process_that_began_it() -> None:
    """What was begun stays here although newer ones are saved, and is finished first."""
    objects = memory_objects()
    storage = MemoryStorage()
    run = TieredRun(storage, keep=1)
    begun = run.train_and_save()
    stops = FaultPlan([FaultRule(FaultPoint.REMOTE_PIECE_STORED, 2, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        run.push(objects, faults=stops)
    assert read_head(objects).uploading == begun
    run.release()
    after = TieredRun(storage, keep=1)
    gate = threading.Event()

    class Held(BreakingObjects):
        def create(self, key: str, data: Bytes) -> bool:
            assert gate.wait(WAIT_S)
            return super().create(key, data)

    said = Said()
    tier = after.tier(Held(objects), events=said)
    for _ in range(3):
        newest = after.train_and_save()
    gate.set()
    tier.close()
    shipped = [fields["name"] for name, fields in said.events if name == "checkpoint_shipped"]
    assert shipped == [begun, newest]


def test_a_piece_that_was_stored_wrong_is_stored_again_before_the_pointer_moves() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    newest = run.train_and_save()
    run.push(objects)
    key = pieces(objects, newest)[1]
    other = memory_objects()
    other.create(key, bytes(objects.list(key.rpartition("/")[0])[key]))
    run.push(other)
    assert other.read(key) == objects.read(key)
    assert resumed_elsewhere(other).restored_step == 1


def test_a_checkpoint_damaged_here_is_not_shipped_and_the_one_before_is() -> None:
    objects = memory_objects()
    storage = MemoryStorage()
    run = TieredRun(storage)
    whole = run.train_and_save()
    newest = run.train_and_save()
    path = f"checkpoints/{newest}/{MODEL}"
    data = bytearray(storage.read(path))
    data[-1] ^= 1
    storage.damage(path, bytes(data))
    with pytest.raises(DamagedError, match="is not what was committed"):
        run.push(objects)
    assert f"checkpoints/{newest}/manifest.json" not in objects.list("checkpoints")
    assert read_head(objects).target is None
    tier = run.tier(objects)
    status = tier.close()
    assert status.checkpoint == whole


def test_retention_follows_the_ledger_and_deletes_nothing_that_is_pointed_to() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage(), keep=1)
    tier = run.tier(objects)
    try:
        names = [run.train_and_save() for _ in range(3)]
    finally:
        status = tier.close()
    assert status.last_error == ""
    assert status.checkpoint == names[-1]
    head = run.push(objects)
    check_no_leftovers(objects)
    held = {one.directory for one in head.checkpoints}
    assert held <= {record.directory for record in run.ledger.committed()}


def test_a_segment_is_stored_once_and_read_back_once() -> None:
    objects = BreakingObjects(memory_objects())
    run = TieredRun(MemoryStorage())
    for _ in range(4):
        run.train_and_save()
        run.push(objects)
    touched = Counter(
        key
        for action, key in objects.requests
        if action in ("create", "fingerprint") and key.startswith("segments/")
    )
    assert len(touched) >= 4
    assert set(touched.values()) == {2}


def test_what_the_pointer_names_is_not_collected_while_the_store_is_down() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage(), keep=1)
    first = run.train_and_save()
    tier = run.tier(objects)
    assert tier.close().checkpoint == first
    down = BreakingObjects(objects)
    run.release()
    again = TieredRun(run.storage, keep=1)
    down.breaks = {number: (RemoteUnavailableError("down"), False) for number in range(10_000)}
    tier = again.tier(down, options=dataclasses.replace(OPTIONS, close_timeout_s=0.1))
    for _ in range(3):
        again.train_and_save()
    status = tier.close()
    assert "down" in status.last_error
    names = [record.directory for record in again.ledger.committed()]
    assert first in names
    assert len(names) <= 3, "what is kept for the remote tier is bounded"
    assert again.engine.verify(first).ok
    assert resumed_elsewhere(objects).restored_step == 1


def test_a_pull_falls_back_to_the_checkpoint_before_and_says_so() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    whole = run.train_and_save()
    run.push(objects)
    newest = run.train_and_save()
    run.push(objects)
    key = pieces(objects, newest)[0]
    objects.overwrite(key, b"x" * len(objects.read(key)))
    said = Said()
    report = pull(MemoryStorage(), objects, context=context(events=said))
    assert report.checkpoint == whole
    assert [name for name, _ in report.skipped] == [newest]
    assert said.names() == ["checkpoint_damaged", "pulled"]
    objects.delete(pieces(objects, whole))
    with pytest.raises(DamagedError, match="no checkpoint of the remote tier is whole"):
        fetch(objects)


def test_a_log_part_that_is_missing_or_wrong_is_damage() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    run.train_and_save()
    run.push(objects)
    key = max(objects.list("log"))
    data = objects.read(key)
    objects.overwrite(key, bytes(len(data)))
    with pytest.raises(DamagedError, match="copy in the remote tier is damaged"):
        fetch(objects)
    objects.delete([key])
    with pytest.raises(DamagedError, match="missing in the remote tier"):
        fetch(objects)
    run.push(objects)
    objects.delete(["head.json"])
    run.push(objects)
    assert resumed_elsewhere(objects).restored_step == 1


def test_a_pull_follows_a_pointer_that_moves() -> None:
    """While a checkpoint is fetched, the run ships others and drops it."""
    objects = memory_objects()
    run = TieredRun(MemoryStorage(), keep=1)
    run.train_and_save()
    one = dataclasses.replace(OPTIONS, keep=1, parallel=1)
    run.push(objects, options=one)

    class Moving(BreakingObjects):
        def read_into(self, key: str, out: memoryview) -> bool:
            if run.step < 4:
                run.train_and_save()
                run.push(objects, options=one)
            return super().read_into(key, out)

    said = Said()
    storage = MemoryStorage()
    report = pull(storage, Moving(objects), context=context(events=said, options=one))
    assert report.checkpoint == "step-00000004-1"
    assert said.names() == ["pulled"], "what was dropped is not damaged"
    assert TieredRun(storage).restored_step == 4


def test_an_interrupted_pull_is_no_run_and_goes_on() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    run.train_and_save()
    run.push(objects)
    counting = BreakingObjects(objects)
    pull(MemoryStorage(), counting, context=context())
    for number in range(len(counting.requests)):
        storage = MemoryStorage()
        stops = BreakingObjects(objects, {number: (ValueError("stopped"), False)})
        with pytest.raises(ValueError, match="stopped"):
            pull(storage, stops, context=context())
        assert not storage.exists("run.json")
        assert fetch(objects, storage) == "step-00000001-1"
        assert TieredRun(storage).restored_step == 1


@pytest.mark.parametrize("flipped", [False, True])
def test_a_pull_into_the_own_directory_fetches_what_is_missing_or_damaged(flipped: bool) -> None:
    objects = memory_objects()
    storage = MemoryStorage()
    run = TieredRun(storage)
    newest = run.train_and_save()
    run.push(objects)
    with pytest.raises(RunBusyError):
        fetch(objects, storage)
    run.release()
    if flipped:
        path = f"checkpoints/{newest}/{MODEL}"
        data = bytearray(storage.read(path))
        data[-1] ^= 1
        storage.write_atomic(path, bytes(data))
    else:
        storage.remove(f"checkpoints/{newest}")
    report = pull(storage, objects, context=context())
    assert 0 < report.bytes < 20_000
    assert TieredRun(storage).restored_step == 1


def test_a_pull_refuses_the_directory_of_another_run_and_unknown_checkpoints() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    run.train_and_save()
    run.push(objects)
    other = MemoryStorage()
    other.write_atomic("run.json", sealed_json.encode({"format": 1, "run_id": "e" * 32}))
    with pytest.raises(ConfigError, match="another run"):
        fetch(objects, other)
    with pytest.raises(ConfigError, match="it holds step-00000001-1"):
        fetch(objects, checkpoint="step-00000009-1")
    with pytest.raises(NothingToResumeError):
        fetch(memory_objects())


def test_a_prefix_takes_one_run() -> None:
    objects = memory_objects()
    TieredRun(MemoryStorage()).push(objects)
    storage = MemoryStorage()
    storage.make_dirs("")
    storage.write_atomic(
        "run.json",
        sealed_json.encode(
            {
                "format": 1,
                "run_id": "e" * 32,
                "created_wall_s": 2.0,
                "versions": {},
                "config_digest": "",
                "dataset_digest": "",
            }
        ),
    )
    with pytest.raises(FencedError, match="choose another prefix"):
        TieredRun(storage).push(objects)


def test_config_is_shipped_in_every_state() -> None:
    objects = memory_objects()
    storage = MemoryStorage()
    run = TieredRun(storage)
    for text in (b"a: 1\n", b"a: 2\n"):
        storage.write_atomic("config.yaml", text)
        run.push(objects)
        pulled = MemoryStorage()
        fetch(objects, pulled)
        assert pulled.read("config.yaml") == text


def test_pointers_of_the_future_are_refused() -> None:
    head = {"run_id": "r", "incarnation": 1, "claim": "c"}
    with pytest.raises(FutureFormatError):
        decode_head(sealed_json.encode({"format": 2, **head}))
    with pytest.raises(FutureFormatError, match="telepathy"):
        decode_head(sealed_json.encode({"format": 1, "features": ["telepathy"], **head}))
    with pytest.raises(DamagedError, match="lacks a readable field"):
        decode_head(sealed_json.encode({"format": 1, **head}))


def test_status_tells_the_lag_and_the_exposure() -> None:
    objects = memory_objects()
    clock = ManualClock()
    run = TieredRun(MemoryStorage(), clock=clock)
    run.train_and_save()
    down = BreakingObjects(objects)
    down.breaks = {number: (RemoteUnavailableError("down"), False) for number in range(10_000)}
    tier = run.tier(down, options=dataclasses.replace(OPTIONS, close_timeout_s=0.05))
    status = tier.close()
    assert (status.checkpoint, status.behind_checkpoints) == ("", 1)
    assert status.exposure_s is None
    assert status.behind_log_bytes > 0
    assert status.retries > 0
    tier = run.tier(objects)
    status = tier.close()
    assert (status.behind_checkpoints, status.behind_log_bytes, status.exposure_s) == (0, 0, 0.0)
    run.train()
    clock.advance(7.0)
    status = tier.status()
    assert status.behind_log_bytes > 0
    assert status.exposure_s is not None
    assert status.exposure_s >= 7.0
