"""A loop that saves after every step from a writer process, until it is killed.

``python saving_process.py RUN``. Prints what happens, a line each: ``started after STEP``,
``committed STEP``, ``lost`` when the writer process had to be replaced. Ends with a traceback if
what was restored is not the state of its step.
"""

from __future__ import annotations

import sys

import numpy as np

from perdure import CheckpointEngine, every

ELEMENTS = 1_500_000
STEPS = 1_000_000


def say(name: str, fields: dict[str, object]) -> None:
    if name == "checkpoint_committed":
        sys.stdout.write(f"committed {fields['step']}\n")
    if name == "checkpoint_writer_lost":
        sys.stdout.write("lost\n")
    sys.stdout.flush()


def main() -> None:
    arrays = {name: np.zeros(ELEMENTS) for name in ("first", "second")}
    engine = CheckpointEngine(
        sys.argv[1], save=every(steps=1), keep=2, writer="process", events=say
    )
    engine.register(**arrays)
    started = False
    for step in engine.steps(STEPS):
        if not started:
            started = True
            check(arrays, step - 1)
            sys.stdout.write(f"started after {step - 1}\n")
        for array in arrays.values():
            array.fill(step)
        # Whatever the budget says: the drill wants saves.
        engine.save()


def check(arrays: dict[str, np.ndarray], step: int) -> None:
    for name, array in arrays.items():
        assert array.min() == array.max() == step, f"{name} is not the state after step {step}"


if __name__ == "__main__":
    main()
