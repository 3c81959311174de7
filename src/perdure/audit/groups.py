"""Every prompt group's life, and the law that none appears, vanishes or is counted twice."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perdure.audit.attempts import Attempts
from perdure.audit.history import Event
from perdure.audit.payloads import Payloads, packed_ids
from perdure.audit.report import Findings
from perdure.audit.schema import session_key

STATES = ("pending", "running", "finished", "failed", "taken", "trained", "evicted")
TRANSITIONS: Mapping[tuple[str, str], str] = {
    ("pending", "session"): "running",
    ("running", "session"): "running",
    ("running", "finished"): "finished",
    ("pending", "failed"): "failed",
    ("running", "failed"): "failed",
    ("finished", "taken"): "taken",
    ("taken", "trained"): "trained",
    ("finished", "evicted"): "evicted",
    ("failed", "evicted"): "evicted",
    ("finished", "poison"): "evicted",
    ("failed", "poison"): "evicted",
    ("taken", "poison"): "evicted",
}
"""``(state, what happens)`` → next state; anything else breaks the life cycle."""

LIFE_RULE = "a group goes pending → running → finished or failed → taken → trained, or is evicted"
ONCE_RULE = "every group is submitted once and every prompt of the data order is used once"
OLDEST_RULE = "finished groups are taken oldest submission first"
SETTLED_RULE = "a finished group has every session, each with its reward"
LAW_RULE = "submitted = pending + running + finished + failed + taken + trained + evicted"
REWARD_RULE = "rewards are finite"
REFILL_RULE = "an evicted group is replaced by one new group at most"


@dataclass(slots=True)
class Group:
    """A prompt group so far; ``sessions`` are the indexes of those that are done."""

    submitted: Event
    state: str = "pending"
    sessions: set[int] = field(default_factory=set[int])


class Groups:
    """Follows the groups through the kept lineage, record by record."""

    def __init__(self, payloads: Payloads, findings: Findings) -> None:
        self._payloads = payloads
        self._findings = findings
        self._finished: list[int] = []
        self._records = Counter[str]()
        self._refills: dict[int, Event] = {}
        self._prompts: dict[int, bytes | None] = {}
        self.known: dict[int, Group] = {}
        self.attempts = Attempts(findings)
        self.tokens = 0

    def submit(self, event: Event) -> None:
        group = event.fields["group"]
        self.known[group] = Group(event)
        self._prompts[group] = packed_ids(event.fields["prompt_ids"])
        self._records["submitted"] += 1

    def sessions_done(self, event: Event) -> None:
        for row in event.rows:
            self._session_done(event, row)
        self.attempts.done(event, self._payloads.check_sessions(event, self._prompts))

    def _session_done(self, event: Event, row: int) -> None:
        session, reward = event.fields["sessions"][row], event.fields["rewards"][row]
        number, index = session
        self.tokens += event.fields["tokens"][row]
        if not math.isfinite(reward):
            self._findings.violation(
                event.where, f"the reward of {session_key(session)} is {reward}", REWARD_RULE
            )
        group = self._move(number, "session", event)
        if group is None:
            return
        if not 0 <= index < group.submitted.fields["sessions"]:
            self._findings.violation(event.where, f"session {index} of group {number}", LIFE_RULE)
        group.sessions.add(index)

    def partials(self, event: Event) -> None:
        for row in event.rows:
            self._unfinished(event, event.fields["sessions"][row])
        self.attempts.partials(event, self._payloads.check_partials(event))

    def tool_result(self, event: Event) -> None:
        self._unfinished(event, event.fields["session"])
        self.attempts.tool_result(event)

    def restarted(self, event: Event) -> None:
        self._unfinished(event, event.fields["session"])
        self.attempts.restarted(event)

    def _unfinished(self, event: Event, session: Sequence[int]) -> None:
        """Check the group and the session of a record that only an unfinished session writes."""
        number, index = session
        group = self._move(number, "session", event)
        if group is None:
            return
        if not 0 <= index < group.submitted.fields["sessions"]:
            self._findings.violation(event.where, f"session {index} of group {number}", LIFE_RULE)
        if index in group.sessions:
            self._findings.violation(
                event.where, f"{session_key(session)} goes on after its end", LIFE_RULE
            )

    def settle(self, event: Event) -> None:
        number, outcome = event.fields["group"], event.fields["outcome"]
        self._records["settled"] += 1
        group = self._move(number, outcome, event)
        if group is None:
            return
        self.attempts.group_ended(number)
        if outcome != "finished":
            return
        heapq.heappush(self._finished, number)
        missing = set(range(group.submitted.fields["sessions"])) - group.sessions
        if missing:
            self._findings.violation(
                event.where, f"group {number} finished without sessions {missing}", SETTLED_RULE
            )

    def take(self, event: Event) -> None:
        groups = event.fields["groups"]
        self._records["taken"] += len(groups)
        oldest = self._oldest(len(groups))
        if groups != oldest:
            self._findings.violation(
                event.where, f"groups {groups} taken, the oldest are {oldest}", OLDEST_RULE
            )
        for number in groups:
            self._move(number, "taken", event)
        for number in set(oldest) - set(groups):
            heapq.heappush(self._finished, number)

    def _oldest(self, count: int) -> list[int]:
        oldest: list[int] = []
        while self._finished and len(oldest) < count:
            number = heapq.heappop(self._finished)
            if self.known[number].state == "finished":
                oldest.append(number)
        return oldest

    def train(self, groups: Iterable[int], event: Event) -> None:
        """The step of these taken groups is done; those set aside as poison stay evicted."""
        for number in groups:
            if number in self.known and self.known[number].state != "evicted":
                self._move(number, "trained", event)

    def evict(self, event: Event) -> None:
        number = event.fields["group"]
        poison = event.fields["reason"] == "poison"
        group = self.known.get(number)
        self._records["evicted"] += 1
        self._records["poisoned"] += group is not None and group.state == "taken"
        self._move(number, "poison" if poison else "evicted", event)

    def refill(self, event: Event) -> None:
        group, replaces = event.fields["group"], event.fields["replaces"]
        replaced = self.known.get(replaces)
        if replaced is None or replaced.state != "evicted":
            self._findings.violation(
                event.where, f"group {replaces} is replaced and was not evicted", REFILL_RULE
            )
        if group in self._refills:
            self._findings.violation(
                event.where, f"group {group} replaces a second group", REFILL_RULE
            )
        self._refills[group] = event

    def _move(self, number: int, happening: str, event: Event) -> Group | None:
        """Apply one transition; None, and a finding, if there is no such group or it is illegal."""
        group = self.known.get(number)
        if group is None:
            self._findings.violation(event.where, f"group {number} was never submitted", LIFE_RULE)
            return None
        state = TRANSITIONS.get((group.state, happening))
        if state is None:
            self._findings.violation(
                event.where, f"group {number} is {group.state} and then {happening}", LIFE_RULE
            )
            return None
        group.state = state
        return group

    def finish(self) -> dict[str, int]:
        """Check what only the whole history shows; returns the counts by state."""
        counts = Counter(group.state for group in self.known.values())
        self._check_once("group", sorted(self.known))
        self._check_once(
            "data_index", sorted(g.submitted.fields["data_index"] for g in self.known.values())
        )
        for number, event in self._refills.items():
            if number not in self.known:
                self._findings.violation(
                    event.where, f"group {number} was never submitted", REFILL_RULE
                )
        records = self._records
        unsettled = records["submitted"] - records["settled"]
        handed_out = records["taken"] - records["poisoned"]
        if (
            counts["evicted"] != records["evicted"]
            or counts["pending"] + counts["running"] != unsettled
            or counts["taken"] + counts["trained"] != handed_out
        ):
            self._findings.violation(
                "log",
                f"by state {_text(counts)}; by records {_text(records)}",
                LAW_RULE,
            )
        return {state: counts[state] for state in STATES}

    def _check_once(self, name: str, numbers: list[int]) -> None:
        for expected, number in enumerate(numbers):
            if number != expected:
                what = "appears twice" if number < expected else f"where {expected} is missing"
                self._findings.violation("log", f"{name} {number} {what}", ONCE_RULE)
                return


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
