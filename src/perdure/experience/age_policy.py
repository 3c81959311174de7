"""Which groups are too old to train on, and how many prompts to submit instead.

Deciding does no I/O and changes nothing; :meth:`ExperienceStore.evict` and
:meth:`ExperienceStore.refill` apply a decision. Age is counted in global steps:
``prompt_age = global_step - submitted_step + 1``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from perdure.core.ids import GlobalStep, GroupId
from perdure.core.record_types import EvictionReason
from perdure.core.records import Submitted
from perdure.experience.fold import ExperienceState


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
    state: ExperienceState,
    *,
    global_step: GlobalStep,
    policy: AgePolicy,
    threshold: int,
    dynamic_filter: bool = False,
) -> Decision:
    """Decide what leaves, what replaces it and what sampling waits for (spec D3).

    A group that several reasons fit is evicted once, for the first of: failed, age, filtered.

    Args:
        state: The experience as it stands.
        global_step: The step that is about to sample.
        policy: What age leads to.
        threshold: Highest age that is trained on (drop), lowest that blocks (wait); at least 1.
        dynamic_filter: Also evict finished groups whose rewards are all equal (DAPO, Yu et al.
            2025, section 3.2).

    Raises:
        ValueError: The threshold is below 1.
    """
    if threshold < 1:
        raise ValueError(f"age threshold {threshold} is below 1, the age of a fresh prompt")
    evict = [(group.submitted.group, EvictionReason.FAILED) for group in state.table.failed()]
    for group in state.table.finished:
        live = state.groups[group]
        if policy is AgePolicy.DROP and prompt_age(live.submitted, global_step) > threshold:
            evict.append((group, EvictionReason.AGE))
        elif dynamic_filter and live.uniform:
            evict.append((group, EvictionReason.FILTERED))
    blocked_by: tuple[GroupId, ...] = ()
    if policy is AgePolicy.WAIT:
        blocked_by = tuple(
            group.submitted.group
            for group in state.table.open()
            if prompt_age(group.submitted, global_step) >= threshold
        )
    return Decision(
        evict=tuple(sorted(evict, key=lambda item: item[0])),
        refill=len(state.table.owed) + len(evict),
        blocked_by=blocked_by,
    )
