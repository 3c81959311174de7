"""Which groups are not trained on, and how many prompts to submit instead.

Deciding does no I/O and changes nothing; :meth:`ExperienceStore.evict` and
:meth:`ExperienceStore.refill` apply a decision. Age is counted in global steps:
``prompt_age = global_step - submitted_step + 1``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from perdure.core.experience_records import Submitted
from perdure.core.ids import GlobalStep, GroupId, PolicyVersion
from perdure.core.record_types import EvictionReason
from perdure.experience.prompt_group import Group
from perdure.experience.state import ExperienceState


class AgePolicy(enum.Enum):
    """What to do about old prompts.

    ``DROP``: finished groups older than the threshold are evicted. ``WAIT``: nothing is sampled
    while a pending or running group has reached the threshold; nothing is evicted for age.
    ``IGNORE``: age plays no part (on-policy training).
    """

    DROP = "drop"
    WAIT = "wait"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """What makes a group unfit to be trained on. The defaults are those of on-policy training.

    Attributes:
        policy: What the age of a prompt leads to.
        max_prompt_age: Highest age that is trained on (drop), lowest that blocks (wait).
        max_version_span: Most policy versions that generated one session; None: any number.
        max_version_lag: Most publications since the newest token of a session; None: any number.
        dynamic_filter: Groups whose rewards are all equal leave too (DAPO, Yu et al. 2025,
            section 3.2).

    Raises:
        ValueError: A limit is below what a fresh prompt has.
    """

    policy: AgePolicy = AgePolicy.IGNORE
    max_prompt_age: int = 1
    max_version_span: int | None = None
    max_version_lag: int | None = None
    dynamic_filter: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_prompt_age", self.max_prompt_age, 1),
            ("max_version_span", self.max_version_span, 1),
            ("max_version_lag", self.max_version_lag, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} {value} is below {least}, what a fresh prompt has")

    @property
    def limits_versions(self) -> bool:
        """Whether versions play a part."""
        return self.max_version_span is not None or self.max_version_lag is not None


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done before groups are sampled.

    Attributes:
        evict: Groups that leave, oldest submission first, each once, with the reason.
        refill: Prompts to submit in place of evicted groups: one for each of ``evict`` and for each
            earlier eviction that was not yet paid for (by a process that died in between).
        blocked_by: Sampling has to wait for these groups.
    """

    evict: tuple[tuple[GroupId, EvictionReason], ...] = ()
    refill: int = 0
    blocked_by: tuple[GroupId, ...] = ()


def prompt_age(submitted: Submitted, global_step: GlobalStep) -> int:
    """Age of a prompt in global steps; 1 in the step of its submission."""
    return global_step - submitted.submitted_step + 1


def decide(
    state: ExperienceState, *, global_step: GlobalStep, rules: SamplingRules | None = None
) -> Decision:
    """Decide what leaves, what replaces it and what sampling waits for (spec D3, D4).

    A group that several reasons fit is evicted once, for the first of: failed, age, version span,
    version lag, filtered.

    Args:
        state: The experience as it stands.
        global_step: The step that is about to sample.
        rules: What makes a group unfit.
    """
    rules = rules or SamplingRules()
    evict = [(group.submitted.group, EvictionReason.FAILED) for group in state.table.failed()]
    for group in state.table.finished:
        reason = _unfit(state.groups[group], global_step, state.newest_version, rules)
        if reason is not None:
            evict.append((group, reason))
    blocked_by: tuple[GroupId, ...] = ()
    if rules.policy is AgePolicy.WAIT:
        blocked_by = tuple(
            group.submitted.group
            for group in state.table.open()
            if prompt_age(group.submitted, global_step) >= rules.max_prompt_age
        )
    return Decision(
        evict=tuple(sorted(evict, key=lambda item: item[0])),
        refill=len(state.table.owed) + len(evict),
        blocked_by=blocked_by,
    )


def _unfit(
    group: Group, step: GlobalStep, published: PolicyVersion, rules: SamplingRules
) -> EvictionReason | None:
    if rules.policy is AgePolicy.DROP and prompt_age(group.submitted, step) > rules.max_prompt_age:
        return EvictionReason.AGE
    sessions = group.done.values() if rules.limits_versions else ()
    span, lag = rules.max_version_span, rules.max_version_lag
    if span is not None and any(s.last_version - s.first_version >= span for s in sessions):
        return EvictionReason.VERSION_SPAN
    # Versions of a branch that was left may be higher than what is published.
    if lag is not None and any(abs(published - s.last_version) > lag for s in sessions):
        return EvictionReason.VERSION_LAG
    return EvictionReason.FILTERED if rules.dynamic_filter and group.uniform else None
