"""``diff_runs``: the first place, in training order, at which two runs are not the same.

What is compared is what was trained, not where it lies: prompts, tokens, log-probabilities and
rewards of every batch, digests and metrics of every step and evaluation. Wall-clock times, file
positions, incarnations and version numbers are left out, so that a run that was killed and resumed
equals the one that was not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from perdure.audit import schema
from perdure.audit.history import Event, History, Position, read_history
from perdure.audit.payloads import Payloads, packed_ids
from perdure.audit.reader import read_log
from perdure.audit.report import DiffReport, Divergence, Findings
from perdure.audit.trajectories import Trajectories
from perdure.core.errors import AuditFailedError, ConfigError, DamagedError

WARM, TRAIN = 0, 1
UPDATE, DONE, EVALUATED = range(3)

Aspects = dict[str, str]
"""What is compared of a unit of training, in order, each as text."""


class Place(NamedTuple):
    """A unit of training; places sort in training order."""

    phase: int
    name: str
    step: int
    kind: int
    index: int

    def __str__(self) -> str:
        if self.phase == WARM:
            return f"{self.name} step {self.step}"
        texts = {
            UPDATE: f"global step {self.step}, local update {self.index}",
            DONE: f"global step {self.step}, its end",
        }
        return texts.get(self.kind, f"evaluation after global step {self.step}")


class _Run:
    """What one run trained, by place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        findings = Findings()
        log = read_log(path, findings)
        self._refuse(findings)
        history = read_history(log, findings)
        self._refuse(findings)
        self._findings = findings
        self._payloads = Payloads(log.payloads(), findings)
        self._groups: dict[int, Event] = {}
        self._prompts: dict[int, bytes | None] = {}
        self._sessions: dict[int, dict[int, tuple[Event, int]]] = {}
        self._checked: dict[Position, Trajectories] = {}
        self.units: dict[Place, Event] = {}
        self._read(history)
        if not (log.has_recipe or self.units):
            raise ConfigError(
                "the run of a script logs nothing that was trained",
                where=str(path),
                rule="what is compared are batches, steps and evaluations in the log",
                way_out="compare checkpoints: `perdure ckpt diff RUN RUN2`",
            )

    def _read(self, history: History) -> None:
        evaluations = Counter[int]()
        for event in history.kept():
            fields = event.fields
            if event.type == schema.SUBMITTED:
                self._groups[fields["group"]] = event
                self._prompts[fields["group"]] = packed_ids(fields["prompt_ids"])
            elif event.type == schema.SESSIONS_DONE:
                for row in event.rows:
                    group, index = fields["sessions"][row]
                    self._sessions.setdefault(group, {})[index] = (event, row)
            elif event.type == schema.TAKEN:
                step, local_update = fields["update"]
                self.units[Place(TRAIN, "", step, UPDATE, local_update)] = event
            elif event.type == schema.STEP_DONE:
                self.units[Place(TRAIN, "", fields["global_step"], DONE, 0)] = event
            elif event.type == schema.PHASE_STEP:
                self.units[Place(WARM, fields["phase"], fields["step"], DONE, 0)] = event
            elif event.type == schema.EVALUATED:
                step = fields["global_step"]
                place = Place(TRAIN, "", step, EVALUATED, evaluations[step])
                evaluations[step] += 1
                self.units[place] = event

    def aspects(self, place: Place) -> Aspects:
        """What is compared at a place."""
        event = self.units[place]
        if place.kind == UPDATE:
            groups = event.fields["groups"]
            aspects = {"groups in the batch": str(len(groups))}
            for index, number in enumerate(groups, start=1):
                aspects |= self._group(f"group {index} of {len(groups)}", number)
            return aspects
        compared = ("digest", "policy_digest", "optimizer_step", "skipped", "final")
        aspects = {n: schema.canonical(event.fields[n]) for n in compared if n in event.fields}
        metrics: Mapping[str, Any] = event.fields["metrics"]
        return aspects | {f"metric {name}": repr(metrics[name]) for name in sorted(metrics)}

    def _group(self, label: str, number: int) -> Aspects:
        submitted, sessions = self._groups.get(number), self._sessions.get(number, {})
        if submitted is None:
            raise AuditFailedError(
                f"group {number} was taken and never submitted",
                where=str(self._path),
                way_out="see what `perdure audit` says of this run",
            )
        fields = submitted.fields
        prompt = repr([fields["prompt_ids"], fields["task"], fields["answer"]])
        aspects = {f"{label}, prompt": prompt}
        for index in sorted(sessions):
            aspects |= self._session(f"{label}, session {index}", *sessions[index])
        return aspects

    def _session(self, label: str, event: Event, row: int) -> Aspects:
        trajectories = self._checked.get(event.position)
        if trajectories is None:
            trajectories = self._payloads.check_sessions(event, self._prompts)
            self._refuse(self._findings)
            assert trajectories is not None
            self._checked[event.position] = trajectories
        tokens, mask, logprobs = (
            trajectories.response(row, name) for name in ("response_ids", "loss_mask", "logprobs")
        )
        reward = [event.fields["rewards"][row], event.fields["parts"][row]]
        return {
            f"{label}, tokens": _hash(tokens, mask),
            f"{label}, log-probabilities": _hash(logprobs),
            f"{label}, reward": schema.canonical(reward),
        }

    def _refuse(self, findings: Findings) -> None:
        """What cannot be trusted cannot be compared."""
        for finding in findings.all:
            kind = DamagedError if finding.severity == "damage" else AuditFailedError
            raise kind(
                finding.what,
                where=f"{self._path}, {finding.where}",
                rule=finding.rule,
                way_out="see what else `perdure audit` says of this run",
            )


def diff_runs(a: Path, b: Path) -> DiffReport:
    """Compare two runs in training order.

    Args:
        a: The first run directory.
        b: The second run directory.

    Returns:
        The first divergence, or none: then both trained the same batches to the same states.

    Raises:
        NothingToResumeError: One is not a run.
        DamagedError: The log of one is damaged.
        AuditFailedError: What the log of one says cannot be true.
        FutureFormatError: A newer version has written part of one.
        ConfigError: One is the run of a script, which logs nothing that could be compared.
    """
    first, second = _Run(a), _Run(b)
    counts: Counter[str] = Counter({"updates": 0, "steps": 0, "evaluations": 0, "phase steps": 0})
    for place in sorted(first.units.keys() | second.units.keys()):
        divergence = _divergence(place, first, second)
        if divergence is not None:
            return DiffReport(a, b, divergence, counts)
        kinds = {UPDATE: "updates", EVALUATED: "evaluations"}
        ended = "steps" if place.phase == TRAIN else "phase steps"
        counts[kinds.get(place.kind, ended)] += 1
    return DiffReport(a, b, None, counts)


def _divergence(place: Place, first: _Run, second: _Run) -> Divergence | None:
    has = [place in run.units for run in (first, second)]
    if not all(has):
        texts = ["recorded" if there else "not recorded" for there in has]
        return Divergence(str(place), "only one run has it", *texts)
    one, other = first.aspects(place), second.aspects(place)
    for aspect in one | other:
        texts = [aspects.get(aspect, "absent") for aspects in (one, other)]
        if texts[0] != texts[1]:
            return Divergence(str(place), aspect, *texts)
    return None


def _hash(*parts: memoryview) -> str:
    """xxh3-128 over the parts and their lengths."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()
