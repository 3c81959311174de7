"""A run written by format 1 stays readable: by recovery, by the audit, by the checkpoint reader.

``tests/golden/run-v1`` was cut off in its second step and resumed to the end. If this test fails,
the format has changed: raise its number and keep reading the old one.
"""

from __future__ import annotations

from pathlib import Path

from perdure.audit import audit_run
from perdure.checkpoint import verify
from perdure.core.digests import digest_arrays
from perdure.core.ids import SessionId
from perdure.experience import GroupState, read_experience
from perdure.experience.payloads import PayloadReader
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parent.parent / "golden" / "run-v1"
TOKENS_DIGEST = "30e192c29aab8acdc5151d0f7bca2a51"
FINAL_DIGEST = "b1dd23a006d5edcde864f00450210279"


def test_the_log_folds_to_what_it_said() -> None:
    state, report = read_experience(PosixStorage(GOLDEN))
    state.check()
    assert not report.tails
    assert len(state.incarnations) == 2
    assert state.last_step == 3
    assert state.step_done[state.last_step].digest == FINAL_DIGEST
    assert state.counts[GroupState.TRAINED] == 12
    assert [record.digest for record in state.redone.values()] == [state.step_done[1].digest]


def test_the_audit_proves_it() -> None:
    report = audit_run(GOLDEN)
    assert report.ok, "\n".join(report.summary_lines())


def test_its_checkpoints_verify() -> None:
    storage = PosixStorage(GOLDEN)
    state, _ = read_experience(storage)
    assert [record.step for record in state.checkpoints] == [0, 2, 3]
    for record in state.checkpoints:
        report = verify(storage, record.directory, manifest_digest=record.manifest_digest)
        assert report.ok, report.reason


def test_its_tokens_are_where_they_were() -> None:
    storage = PosixStorage(GOLDEN)
    state, _ = read_experience(storage)
    reader = PayloadReader(storage)
    sessions = [
        (SessionId(number, index), group.done[index])
        for number, group in state.groups.items()
        for index in sorted(group.done)
    ]
    trajectories = [
        reader.trajectory(done.batch.record.payload, row=done.row, session=session)
        for session, done in sessions
    ]
    arrays = {
        f"{trajectory.session.key()}/{name}": getattr(trajectory, name)
        for trajectory in trajectories
        for name in ("prompt_ids_P", "response_ids_T", "logprobs_T", "loss_mask_T")
    }
    assert len(trajectories) == 48
    assert digest_arrays(arrays) == TOKENS_DIGEST
