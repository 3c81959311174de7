"""Segments that several checkpoints of the remote tier share: how they are cut, when they leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from tier_cases import (
    OPTIONS,
    BreakingObjects,
    TieredRun,
    check_no_leftovers,
    context,
    memory_objects,
    resumed_elsewhere,
)

from perdure.checkpoint.tier import ObjectStore, pull, read_head
from perdure.checkpoint.tier.head import HEAD, Head
from perdure.checkpoint.tier.objects import Bytes
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.storage import MemoryStorage


@pytest.mark.parametrize("sizes", [(4096, 64, 64, 64), (64, 4096, 64, 128)], ids=str)
def test_a_run_that_changes_its_piece_size_is_pulled_whole(sizes: Sequence[int]) -> None:
    """Segments stay as they were cut, also when whoever stored them is gone."""
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    for size in sizes:
        newest = run.train_and_save()
        run.push(objects, options=dataclasses.replace(OPTIONS, piece_bytes=size))
        report = pull(MemoryStorage(), objects, context=context())
        assert (report.checkpoint, report.skipped) == (newest, ())
    assert resumed_elsewhere(objects).restored_step == len(sizes)
    check_no_leftovers(objects)


def test_an_upload_that_goes_on_with_another_piece_size_is_pulled_whole() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    newest = run.train_and_save()
    stops = FaultPlan([FaultRule(FaultPoint.REMOTE_PIECE_STORED, 2, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        run.push(objects, faults=stops)
    run.push(objects, options=dataclasses.replace(OPTIONS, piece_bytes=64))
    assert pull(MemoryStorage(), objects, context=context()).checkpoint == newest
    for _ in range(3):
        run.train_and_save()
        run.push(objects)
    check_no_leftovers(objects)


def far_apart(run: TieredRun) -> str:
    """A checkpoint that shares no segment with the one before: the ring went round meanwhile."""
    for _ in range(3):
        run.train()
    return run.train_and_save()


def without_a_manifest(objects: ObjectStore) -> tuple[TieredRun, str]:
    """A run whose first of two checkpoints in the store has lost its manifest; its directory."""
    run = TieredRun(MemoryStorage(), keep=10)
    for _ in range(2):
        far_apart(run)
        head = run.push(objects)
    lost, _ = (one.directory for one in head.checkpoints)
    objects.delete([f"checkpoints/{lost}/manifest.json"])
    return run, lost


def test_segments_whose_checkpoint_has_lost_its_manifest_leave_with_it() -> None:
    objects = memory_objects()
    run, lost = without_a_manifest(objects)
    far_apart(run)
    head = run.push(objects)
    assert lost not in {one.directory for one in head.checkpoints}
    check_no_leftovers(objects)
    assert resumed_elsewhere(objects).restored_step == run.step


def deleted(objects: BreakingObjects) -> set[str]:
    """Segments whose objects were deleted."""
    keys = [key for action, key in objects.requests if action == "delete"]
    return {key.rpartition("/")[0] for key in keys if key.startswith("segments/")}


def test_what_is_being_stored_is_nothing_that_has_no_name() -> None:
    """Of the upload, and of the ones beside it, nothing goes while a checkpoint is stored."""
    objects = memory_objects()
    run, lost = without_a_manifest(objects)
    far_apart(run)
    stops = FaultPlan([FaultRule(FaultPoint.REMOTE_PIECE_STORED, 2, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        run.push(objects, faults=stops)
    head = read_head(objects)
    assert head.uploading_segments
    put(objects, dataclasses.replace(head, checkpoints=head.checkpoints[1:], dropped=(lost,)))
    there = BreakingObjects(objects)
    tier = run.tier(there)
    status = tier.close()
    assert status.checkpoint == head.uploading
    moved = [number for number, (action, _) in enumerate(there.requests) if action == "swap"][-2]
    before = BreakingObjects(objects)
    before.requests = there.requests[:moved]
    assert not deleted(before)
    assert deleted(there)
    assert not deleted(there) & {*head.uploading_segments}
    check_no_leftovers(objects)


def test_what_leaves_takes_nothing_from_what_is_being_stored() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    leaving = run.train_and_save()
    put(objects, dataclasses.replace(run.push(objects), checkpoints=()))
    before = {key.rpartition("/")[0] for key in objects.list("segments")}
    run.train_and_save()
    stops = FaultPlan([FaultRule(FaultPoint.REMOTE_PIECE_STORED, 2, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        run.push(objects, faults=stops)
    head = read_head(objects)
    both = before & {*head.uploading_segments}
    assert both
    put(objects, dataclasses.replace(head, dropped=(leaving,)))
    there = BreakingObjects(objects)
    run.push(there)
    assert deleted(there) == before - both
    check_no_leftovers(objects)


class Beside(BreakingObjects):
    """Another process of the same incarnation begins to store a checkpoint meanwhile."""

    def __init__(self, objects: ObjectStore, begun: str) -> None:
        super().__init__(objects)
        self.begun = begun

    def list(self, prefix: str) -> dict[str, int]:
        found = super().list(prefix)
        if prefix == "segments" and self.begun:
            head = read_head(self.objects)
            put(
                self.objects,
                dataclasses.replace(
                    head,
                    uploading=self.begun,
                    uploading_segments=tuple({key.rpartition("/")[0] for key in found}),
                    sequence=head.sequence + 1,
                ),
            )
            self.begun = ""
        return found


def test_what_another_process_announces_meanwhile_stays() -> None:
    objects = memory_objects()
    run, lost = without_a_manifest(objects)
    before = {*objects.list("segments")}
    head = read_head(objects)
    put(objects, dataclasses.replace(head, checkpoints=head.checkpoints[1:], dropped=(lost,)))
    beside = Beside(objects, "step-00000099-1")
    run.push(beside)
    assert not beside.begun
    assert not deleted(beside)
    assert read_head(objects).dropped == (lost,)
    assert {*objects.list("segments")} == before


def test_without_a_pointer_nothing_is_called_left_over() -> None:
    """Somebody has deleted it: what it named may be all there is."""
    objects = memory_objects()
    run, lost = without_a_manifest(objects)
    head = read_head(objects)
    put(objects, dataclasses.replace(head, checkpoints=head.checkpoints[1:], dropped=(lost,)))

    class Gone(BreakingObjects):
        def list(self, prefix: str) -> dict[str, int]:
            if prefix == "segments":
                self.objects.delete([HEAD])
            return super().list(prefix)

    gone = Gone(objects)
    run.push(gone)
    assert HEAD in [key for action, key in gone.requests if action == "swap"]
    assert not deleted(gone)


class Overtaking(BreakingObjects):
    """A process beside this one announces the next checkpoint, once, while this one's is stored."""

    def __init__(self, objects: ObjectStore, own: str) -> None:
        super().__init__(objects)
        self.own = own

    def create(self, key: str, data: Bytes) -> bool:
        created = super().create(key, data)
        if key == f"checkpoints/{self.own}/manifest.json":
            head = read_head(self.objects)
            assert head.uploading == self.own
            given_up, self.own = self.own, ""
            put(
                self.objects,
                dataclasses.replace(
                    head,
                    uploading="step-00000099-1",
                    uploading_segments=(),
                    dropped=(*head.dropped, given_up),
                    sequence=head.sequence + 1,
                ),
            )
        return created


def test_a_checkpoint_that_another_process_gave_up_is_whole_or_not_pointed_to() -> None:
    objects = memory_objects()
    run = TieredRun(MemoryStorage())
    run.train_and_save()
    run.push(objects)
    newest = run.train_and_save()
    overtaking = Overtaking(objects, newest)
    run.push(overtaking)
    assert not overtaking.own
    assert deleted(overtaking), "what was given up has gone, before it was stored once more"
    report = pull(MemoryStorage(), objects, context=context())
    assert (report.checkpoint, report.skipped) == (newest, ())
    assert resumed_elsewhere(objects).restored_step == 2


def put(objects: ObjectStore, head: Head) -> None:
    objects.overwrite(HEAD, head.encode())
