"""The order of training: updates without gaps, versions that mean one thing, honest redo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.audit.groups import Groups
from perdure.audit.history import Event, Position
from perdure.audit.report import Findings
from perdure.audit.schema import session_key

ORDER_RULE = "updates follow each other without gaps, and a step is done after its last one"
VERSION_RULE = "a policy version is published before it is used and never means other bytes"
DIGEST_RULE = "what is published and evaluated after a step are that step's weights"
REDO_RULE = "a redone step says truly whether its digest came out the same"
PHASE_RULE = "the steps of a phase follow each other"
CHECKPOINT_RULE = "a checkpoint's position lies behind its own step and before the next one"
COLLECT_RULE = "the last committed checkpoint is never collected"


class Training:
    """Follows updates, steps, versions and checkpoints through the kept lineage."""

    def __init__(
        self, groups: Groups, *, positions: frozenset[Position], findings: Findings
    ) -> None:
        self._groups = groups
        self._positions = positions
        self._findings = findings
        self._taken: dict[int, list[Event]] = {}
        self._versions: dict[int, str] = {}
        self._drifted = False
        self._last_step = 0
        self._phase_steps: dict[str, int] = {}
        self.steps: dict[int, Event] = {}
        self.updates = 0
        self.checkpoints: dict[str, Event] = {}
        """Committed and not collected, by directory."""

    def take(self, event: Event) -> None:
        step, local_update = event.fields["update"]
        expected = (self._last_step + 1, len(self._taken.get(self._last_step + 1, ())))
        if (step, local_update) != expected or not event.fields["groups"]:
            self._findings.violation(
                event.where,
                f"update {step}.{local_update} of {len(event.fields['groups'])} groups"
                f" where {expected[0]}.{expected[1]} belongs",
                ORDER_RULE,
            )
        self._taken.setdefault(step, []).append(event)
        self.updates += 1
        self._groups.take(event)

    def step_done(self, event: Event) -> None:
        step = event.fields["global_step"]
        if step != self._last_step + 1 or step not in self._taken:
            self._findings.violation(
                event.where,
                f"step {step} is done after step {self._last_step} and"
                f" {len(self._taken.get(step, ()))} updates of its own",
                ORDER_RULE,
            )
        before = self.steps.get(self._last_step)
        if before and event.fields["optimizer_step"] < before.fields["optimizer_step"]:
            self._findings.violation(event.where, "optimizer_step went down", ORDER_RULE)
        self.steps[step] = event
        self._last_step = step
        for taken in self._taken.get(step, ()):
            self._groups.train(taken.fields["groups"], event)

    def redone(self, event: Event) -> None:
        step, digest, equal = (event.fields[name] for name in ("global_step", "digest", "equal"))
        done = self.steps.get(step)
        if done is None or (done.fields["digest"] == digest) != equal:
            self._findings.violation(
                event.where, f"step {step} redone with digest {digest}, equal {equal}", REDO_RULE
            )
        if not equal:
            self._drifted = True
            self._findings.note(
                event.where,
                f"step {step} came out differently when it was redone",
                "outside deterministic mode drift is measured and reported",
            )

    def published(self, event: Event) -> None:
        """Void publications count here: their version is used up all the same."""
        version, digest = event.fields["version"], event.fields["digest"]
        if self._versions.setdefault(version, digest) != digest:
            self._findings.violation(
                event.where, f"version {version} was published with other bytes", VERSION_RULE
            )
        if not event.void:
            self._check_digest(event)

    def evaluated(self, event: Event) -> None:
        self._check_digest(event)

    def _check_digest(self, event: Event) -> None:
        step, digest = event.fields["global_step"], event.fields["digest"]
        done = self.steps.get(step)
        if done is None and step:
            self._findings.violation(event.where, f"step {step} is not done", DIGEST_RULE)
        if done is not None and done.fields["policy_digest"] != digest and not self._drifted:
            self._findings.violation(
                event.where,
                f"digest {digest} after step {step}, whose policy is"
                f" {done.fields['policy_digest']}",
                DIGEST_RULE,
            )

    def check_versions(self, event: Event) -> None:
        """The versions of sessions, done or partial, were published before their tokens."""
        fields = event.fields
        first, last = fields["first_versions"], fields["last_versions"]
        if self._versions.keys() >= {*first, *last}:
            return
        for row in event.rows:
            for version in sorted({first[row], last[row]} - self._versions.keys()):
                self._findings.violation(
                    event.where,
                    f"{session_key(fields['sessions'][row])}: version {version} was not published",
                    VERSION_RULE,
                )

    def phase_step(self, event: Event) -> None:
        phase, step = event.fields["phase"], event.fields["step"]
        last = self._phase_steps.get(phase, 0)
        if step <= last:
            self._findings.violation(
                event.where, f"{phase} step {step} follows step {last}", PHASE_RULE
            )
        self._phase_steps[phase] = step

    def update_failed(self, event: Event) -> None:
        step, local_update = event.fields["update"]
        if local_update >= len(self._taken.get(step, ())):
            self._findings.violation(
                event.where, f"update {step}.{local_update} failed and was not taken", ORDER_RULE
            )

    def checkpointed(self, event: Event) -> None:
        self.checkpoints[event.fields["directory"]] = event
        position = tuple(event.fields["position"])
        problem = ""
        if position not in self._positions or position > event.position:
            problem = f"its position {list(position)} is not the end of an earlier kept record"
        elif event.fields["phase"] == "train":
            problem = self._place_problem(event.fields, position)
        if problem:
            self._findings.violation(event.where, problem, CHECKPOINT_RULE)

    def _place_problem(self, fields: Mapping[str, Any], position: Position) -> str:
        """Redo from the position must train every later update, and none that the state has."""
        step = fields["step"]
        done = self.steps.get(step)
        if step and (done is None or done.position > position):
            return f"step {step} is not done at its position {list(position)}"
        later = self._taken.get(step + 1, ())
        if later and later[0].position <= position:
            return f"step {step + 1} has begun at its position {list(position)}"
        return ""

    def collect(self, event: Event) -> None:
        had = len(self.checkpoints)
        for directory in event.fields["directories"]:
            self.checkpoints.pop(directory, None)
        if had and not self.checkpoints:
            self._findings.violation(
                event.where, f"{', '.join(event.fields['directories'])} collected", COLLECT_RULE
            )
