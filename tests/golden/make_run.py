"""Write ``tests/golden/run-v1`` again: only before a format is released, never afterwards.

    python tests/golden/make_run.py

The run is cut off in its second step and resumed to the end. Prints the digests that
``tests/integration/test_golden_run.py`` has to name.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from perdure.config import load_config
from perdure.core.digests import digest_arrays
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.core.ids import SessionId
from perdure.experience import read_experience
from perdure.experience.payloads import PayloadReader
from perdure.storage import PosixStorage
from perdure.trainers import launch
from perdure.trainers.config import RunConfig

RUN = Path(__file__).parent / "run-v1"
RECIPE = Path(__file__).parents[1] / "drills" / "drill_recipe.yaml"
OVERRIDES = [
    "trainer.total_steps=3",
    "trainer.local_updates_per_step=1",
    "learner.supervised.steps=4",
    "checkpoint.every_steps=2",
    "checkpoint.keep=3",
    "log.segment_bytes=67108864",
]
NOT_OF_THE_FORMAT = (
    "tensorboard",
    "events.jsonl",
    "curve.png",
    "lock",
    "create.lock",
    "restored.json",
)


def main() -> None:
    shutil.rmtree(RUN, ignore_errors=True)
    plan = FaultPlan([FaultRule(FaultPoint.LOCAL_UPDATE_DONE, 2, FaultAction.RAISE)])
    try:
        config = load_config(RunConfig, RECIPE, OVERRIDES)
        launch.train(config, RUN, injected=launch.Injected(faults=plan))
    except InjectedFault:
        launch.resume(RUN)
    for name in NOT_OF_THE_FORMAT:
        path = RUN / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    storage = PosixStorage(RUN)
    state, _ = read_experience(storage)
    reader = PayloadReader(storage)
    arrays = {}
    for number, group in state.groups.items():
        for index, done in sorted(group.done.items()):
            session = SessionId(number, index)
            ref, row = done.batch.record.payload, done.row
            trajectory = reader.trajectory(ref, row=row, session=session)
            for name in ("prompt_ids_P", "response_ids_T", "logprobs_T", "loss_mask_T"):
                arrays[f"{session.key()}/{name}"] = getattr(trajectory, name)
    sys.stdout.write(f"TOKENS_DIGEST {digest_arrays(arrays)}\n")
    sys.stdout.write(f"FINAL_DIGEST {state.step_done[state.last_step].digest}\n")


if __name__ == "__main__":
    main()
