"""``CheckpointEngine``: five lines that let a training loop survive ``kill -9``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, Unpack

from perdure.checkpoint import CheckpointOptions, Choice
from perdure.checkpoint.checkpointer import MUST_TRIES
from perdure.checkpoint.keep import Keep
from perdure.checkpoint.options import MUST_TIMEOUT_S, STALL_TIMEOUT_S
from perdure.checkpoint.tier import ObjectStore, TierStatus
from perdure.core.clock import SystemClock
from perdure.core.errors import FencedError, PerdureError, StoppedError
from perdure.core.faults import NoFaults
from perdure.runtime.remote import Remote, RemotePlan
from perdure.standalone import refusals
from perdure.standalone.checks import check_mirrors, check_restored
from perdure.standalone.loop_requests import LoopRequests
from perdure.standalone.options import GRACE_S, RANK_TIMEOUT_S, EngineOptions, require_valid
from perdure.standalone.policy import SavePolicy, SaveTrigger, every, whole
from perdure.standalone.ranks import Safety, team_of, warn_of_regrouping
from perdure.standalone.registration import Mirror, PartOptions, Parts
from perdure.standalone.run import open_run
from perdure.standalone.world import OpenRun, RestoredFrom, Restoring, World, log_event
from perdure.storage import PosixStorage


class CheckpointEngine:
    """Saves and restores the registered parts of a loop.

    The same lines are start and resume::

        engine = CheckpointEngine("runs/x", save=every(steps=2000, minutes=20), keep=3)
        engine.register(policy=policy, optimizer=optimizer, rng="all")
        for step in engine.steps(total):
            ...

    Args:
        run_dir: Directory of the run; made if it is absent.
        save: When to save.
        keep: Newest checkpoints that stay, or ``keep(last=…, every=…, best=…)``.
        required: Names that must be registered before anything is saved.
        remote: ``s3://bucket/prefix`` or ``file:///path``, one for each run: everything committed
            is shipped there, and fetched from there when ``run_dir`` is empty.
        options: See :class:`EngineOptions`.

    Raises:
        ConfigError: An option that does not exist, or a value that it cannot have.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        save: SavePolicy | None = None,
        keep: int | Keep = 3,
        required: Iterable[str] = (),
        remote: str | ObjectStore | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        own = ("save", "keep", "required", "remote")
        require_valid(options, save=save, required=required, listed=own)
        clock = options.get("clock") or SystemClock()
        faults = options.get("faults") or NoFaults()
        events = options.get("events") or log_event
        self._bounds = CheckpointOptions(
            keep=keep,
            arenas=options.get("arenas", 2),
            writer=options.get("writer", "auto"),
            must_timeout_s=options.get("must_timeout_s", MUST_TIMEOUT_S),
            stall_timeout_s=options.get("stall_timeout_s", STALL_TIMEOUT_S),
        )
        plan = RemotePlan(remote, self._bounds.rules) if remote else None
        self.restored_from: RestoredFrom | None = None
        """What this process went on from; None after a fresh start."""
        self._world = World(
            run_dir=Path(run_dir),
            storage=options.get("storage") or PosixStorage(Path(run_dir), faults=faults),
            clock=clock,
            faults=faults,
            events=events,
            remote=Remote(plan, clock=clock, faults=faults, events=events) if plan else None,
        )
        self._policy = save or every(minutes=20)
        self._options = options
        self._parts = Parts(required, options.get("accept_changes", ()), options.get("migrations"))
        self._requests = LoopRequests(clock)
        self._run: OpenRun | None = None
        self._trigger: SaveTrigger | None = None
        self._started_before = False
        self._leave_by_s: float | None = None
        self._metrics: dict[str, float] = {}

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._parts.progress.step

    @property
    def stopping(self) -> bool:
        """Whether SIGTERM has come: a long step may be cut short, so that it is saved in time."""
        return self._requests.stopping

    @property
    def skipped(self) -> int:
        """Due saves that found both arenas busy."""
        return self._run.saver.skipped if self._run else 0

    @property
    def last_error(self) -> Exception | None:
        """Why the newest save failed; None once a later one is committed."""
        return self._run.saver.last_error if self._run else None

    def remote_status(self) -> TierStatus | None:
        """How far shipping is behind; None without a remote tier or before the first step."""
        return self._world.remote.status() if self._world.remote else None

    def register(self, **parts: object) -> None:
        """Register parts of the loop under names, each by its type.

        Modules, optimizers, schedules, gradient scalers, tensors, arrays, dicts, lists and deques
        of plain data, random generators, objects with ``state_dict`` and ``load_state_dict``, and
        components of one's own. ``rng="all"`` stands for the global generators. A dict or list of
        such parts becomes nested names: ``agents={"0": …}`` is ``agents/0``.

        Raises:
            ConfigError: A name is taken, or a checkpoint cannot hold such an object.
        """
        self._require_closed("register")
        self._parts.add_all(parts)

    def add(self, name: str, part: object, **how: Unpack[PartOptions]) -> None:
        """Register one part with more say.

        Args:
            name: May nest: ``agents/0/policy``.
            part: As for :meth:`register`.
            how: See :class:`PartOptions`.
        """
        self._require_closed("add")
        self._parts.add(name, part, **how)

    def mirror(self, copy: str, *, of: str) -> None:
        """Say that a script keeps the value at ``of`` also at ``copy`` (``"limits.lr"``).

        After restoring, a copy that disagrees is reported and set to the value at ``of``.
        """
        self._parts.mirrors.append(Mirror(source=of, copy=copy))

    def save(self) -> None:
        """Ask for a save at the next safe point; may be called anywhere, also by a signal handler.

        A step in progress is never saved in the middle.
        """
        self._requests.save()

    def report(self, **metrics: float) -> None:
        """Say how good the state is; the next save carries the newest value of each metric.

        ``keep(best=("reward", "max", 2))`` compares checkpoints by them. Once saved, they are
        forgotten: what was measured counts for one checkpoint. For a save right after a
        measurement call :meth:`save` as well. A value that is not finite counts as none.
        """
        self._metrics.update((name, float(value)) for name, value in metrics.items())

    def steps(self, total: int | None = None, *, change_total: bool = False) -> Iterator[int]:
        """Restore if there is something to restore, then yield the steps that are left.

        Steps count from 1. A step is complete when the next one is asked for; ``break`` and
        exceptions leave it incomplete. After the last step the state is saved, durably.

        Args:
            total: Steps of the whole run, not of this process. May be left out when resuming.
            change_total: Allow another ``total`` than the run was started with.

        Raises:
            ConfigError: Another ``total``; parts that do not fit what is stored.
            RunBusyError: A live process holds the run.
            DamagedError: Something was saved and nothing of it can be used.
            StorageError: The last save could not be made durable.
            FencedError: Another process has taken the run over.
            SystemExit: With code 143, after SIGTERM and its save.
        """
        self.start(total, change_total=change_total)
        run, finished = self._run, False
        try:
            while self.step < self._parts.progress.total:
                yield self.step + 1
                self.complete_step()
            finished = True
        finally:
            # An iterator that is dropped late must not end the loop that came after it.
            if self._run is run:
                self._end(finished=finished)

    def start(self, total: int | None = None, *, change_total: bool = False) -> None:
        """Claim the run and restore: what :meth:`steps` does first. Raises as :meth:`steps`."""
        self._require_closed("start")
        total = whole(total, where="steps()")
        self._parts.require_known(self._parts.accepted)
        self._world = replace(
            self._world,
            team=team_of(
                self._options.get("process_group"),
                timeout_s=self._options.get("rank_timeout_s", RANK_TIMEOUT_S),
                clock=self._world.clock,
            ),
        )
        self.restored_from = None
        self._parts.progress.step = self._parts.progress.total = 0

        def restored(choice: Choice | None) -> None:
            if choice is None and self._started_before:
                raise refusals.moved_on(self._world.run_dir)
            self._parts.progress.agree(total, change=change_total, run_dir=self._world.run_dir)
            if choice is None:
                check_mirrors(self._parts)
            else:
                check = self._options.get("sanity")
                mismatches = check_restored(self._parts, sanity=check, events=self._world.events)
                self.restored_from = RestoredFrom(
                    choice.directory, self.step, choice.skipped, mismatches
                )
                warn_of_regrouping(choice.manifest, self._world, self._parts.registry)

        self._run = open_run(
            self._world,
            registry=self._parts.registry,
            options=self._bounds,
            how=Restoring(
                take_over=self._options.get("take_over", False),
                cold=tuple(self._options.get("cold", ())),
                allow_legacy=self._options.get("allow_legacy", False),
                regrouped=self._parts.accepted,
            ),
            restored=restored,
        )
        self._started_before = True
        now_s = self._world.clock.monotonic_s()
        self._trigger = SaveTrigger(self._policy, step=self.step, now_s=now_s)
        self._leave_by_s = None
        if not self._requests.begin():
            self._warn("signals reach the main thread only: SIGTERM will not save this loop")

    def complete_step(self) -> None:
        """Say that a step is complete: the safe point, for loops that cannot use :meth:`steps`.

        Raises:
            ConfigError: A part holds what a checkpoint cannot store; there was no step left; this
                is a fork of the process that opened the run.
            FencedError: Another process has taken the run over.
            StorageError: This was the last step, and it could not be saved.
            SystemExit: With code 143, after SIGTERM and its save.
        """
        run, trigger = self._started()
        if self.step >= self._parts.progress.total:
            raise refusals.no_step_left(self.step)
        self._parts.progress.step += 1
        now_s = self._world.clock.monotonic_s()
        trigger.step_completed(now_s, saving=run.saver.pending > 0)
        team = self._world.team
        if not team.place.leads:
            self._requests.hand_on(team)
        # One rank decides for all of them: saves are made together or not at all.
        match team.tell(lambda: self._decide(run, trigger, now_s)):
            case Safety.STOP:
                self._save_and_stop(run)
            case Safety.SAVE_LAST:
                run.stage(self._parts.progress, metrics=self._finite_metrics(), must=True)
                if self.stopping:
                    self._stop(saved=True)
            case Safety.SAVE:
                self._stage(run, trigger)
            case _:
                run.store_segments()

    def close(self) -> None:
        """Wait for pending saves and let the run go; :meth:`steps` does so by itself.

        Raises:
            PerdureError: Something could not be made durable.
        """
        self._end(finished=True)

    def __enter__(self) -> Self:
        """Claim and restore; for loops that call :meth:`complete_step`."""
        if self._run is None:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(finished=kind is None)

    def _decide(self, run: OpenRun, trigger: SaveTrigger, now_s: float) -> Safety:
        """What to do at this safe point."""
        if isinstance(run.saver.last_error, FencedError):
            raise run.saver.last_error
        last = self.step == self._parts.progress.total

        def is_due() -> bool:
            decision = trigger.decide(self.step, now_s)
            if decision.warning:
                self._warn(decision.warning)
            return decision.save

        return self._requests.decide(self._world.team, last=last, is_due=is_due)

    def _stage(self, run: OpenRun, trigger: SaveTrigger) -> None:
        started_s = self._world.clock.monotonic_s()
        staged = run.stage(self._parts.progress, metrics=self._finite_metrics(), must=False)
        ended_s = self._world.clock.monotonic_s()
        if not staged:
            trigger.skipped(self.step, ended_s)
            return
        self._requests.saved()
        self._metrics.clear()
        trigger.saved(self.step, started_s=started_s, ended_s=ended_s)

    def _finite_metrics(self) -> dict[str, float]:
        return {name: value for name, value in self._metrics.items() if math.isfinite(value)}

    def _save_and_stop(self, run: OpenRun) -> NoReturn:
        """Save within what is left of the grace period, hand the signal on, and leave the loop."""
        # It may be another rank that was asked.
        asked_s = self._requests.signals.stop_requested_s
        self._leave_by_s = self._grace_end_s(
            self._world.clock.monotonic_s() if asked_s is None else asked_s
        )
        saved = False
        try:
            saved = self._saved_by(self._leave_by_s, run)
        except PerdureError as error:
            self._warn(f"SIGTERM: the save before the end failed ({error})")
        self._stop(saved=saved)

    def _saved_by(self, deadline_s: float, run: OpenRun) -> bool:
        """Save the present state; whether it was durable in time. A torn copy is made again."""
        clock, alone = self._world.clock, self._world.team.place.size == 1
        # Ranks stage together, so all of them as often as each other: once, whatever happens.
        for _ in range(MUST_TRIES if alone else 1):
            if not run.saver.wait(max(0.0, deadline_s - clock.monotonic_s())) and alone:
                return False
            if run.stage(self._parts.progress, metrics=self._finite_metrics(), must=False):
                ended = run.saver.wait(max(0.0, deadline_s - clock.monotonic_s()))
                return ended and run.saver.last_error is None
        return False

    def _stop(self, *, saved: bool) -> NoReturn:
        kept = "is saved" if saved else "is NOT saved, the checkpoint before it stays"
        self._warn(f"SIGTERM: step {self.step} {kept}; start the same script again to go on")
        if self.stopping:
            self._requests.signals.hand_on()
        raise SystemExit(StoppedError.exit_code)

    def _end(self, *, finished: bool) -> None:
        run, self._run = self._run, None
        if run is None or self._requests.signals.forked:
            # A worker forked inside the loop leaves it: the run is its parent's.
            return
        self._requests.signals.put_back()
        asked_s, leave_by_s = self._requests.signals.stop_requested_s, self._leave_by_s
        if leave_by_s is None and asked_s is not None:
            leave_by_s = self._grace_end_s(asked_s)
        try:
            if finished:
                run.close("finished", deadline_s=leave_by_s)
            else:
                run.abandon("left the loop", deadline_s=leave_by_s)
        finally:
            self._requests.signals.make_up_for()

    def _grace_end_s(self, asked_s: float) -> float:
        return asked_s + self._options.get("grace_s", GRACE_S)

    def _started(self) -> tuple[OpenRun, SaveTrigger]:
        if self._run is None or self._trigger is None:
            raise refusals.not_opened()
        if self._requests.signals.forked:
            raise refusals.forked(self._world.run_dir)
        return self._run, self._trigger

    def _require_closed(self, method: str) -> None:
        if self._run is not None:
            raise refusals.open_already(self._world.run_dir, method=method)

    def _warn(self, message: str) -> None:
        self._world.events("warning", {"message": message})
