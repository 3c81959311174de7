"""What a script is told when it uses its engine in the wrong order or place."""

from __future__ import annotations

from pathlib import Path

from perdure.core.errors import ConfigError


def not_opened() -> ConfigError:
    """There is no open run."""
    return ConfigError(
        "a step was completed before the run was opened",
        where="complete_step()",
        rule="a run is claimed and restored before its first step",
        way_out="loop over engine.steps(total), or call engine.start(total) first",
    )


def forked(run_dir: Path) -> ConfigError:
    """A worker forked inside the loop went on with it."""
    return ConfigError(
        "a step was completed in a fork of the process that opened the run",
        where=str(run_dir),
        rule="one process at a time writes a run",
        way_out="leave a forked worker through os._exit(), or use multiprocessing",
    )


def moved_on(run_dir: Path) -> ConfigError:
    """A second loop of one process, with nothing to go back to."""
    return ConfigError(
        "nothing was saved yet, and the registered parts have been trained already",
        where=str(run_dir),
        rule="a second loop in one process goes on from what the first one has saved",
        way_out="start the script again, or make the parts and the engine anew",
    )


def no_step_left(total: int) -> ConfigError:
    """More steps than the run has."""
    return ConfigError(
        f"a step was completed after the last one, {total}",
        where="complete_step()",
        rule="total counts the steps of the whole run, those before a restart included",
        way_out="write: while engine.step < total",
    )


def no_total() -> ConfigError:
    """Neither the run nor the script says how many steps there are."""
    return ConfigError(
        "the number of steps is missing",
        where="steps()",
        rule="the first start of a run says how many steps it has",
        way_out="write engine.steps(total)",
    )


def other_total(run_dir: Path, *, total: int, known: int, step: int) -> ConfigError:
    """Another number of steps than the run was started with."""
    return ConfigError(
        f"steps({total}) at step {step} of {known}",
        where=str(run_dir),
        rule="total counts the steps of the whole run; schedules depend on it",
        way_out=f"leave it at {known}, or allow it: steps({total}, change_total=True)",
    )


def open_already(run_dir: Path, *, method: str) -> ConfigError:
    """What belongs before the loop came inside it."""
    return ConfigError(
        f"{method}() was called while the loop runs",
        where=str(run_dir),
        rule="all parts are known before the first step; one loop at a time",
        way_out="call it before engine.steps()",
    )
