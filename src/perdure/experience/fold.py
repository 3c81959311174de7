"""Folding: the state after the control records of a kept lineage, and which of them are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.core.errors import LifecycleError
from perdure.core.ids import LogPosition, PolicyVersion
from perdure.core.records import is_void
from perdure.experience.reader import Placed
from perdure.experience.state import NO_VERSION, ExperienceState


def fold(records: Iterable[Placed], *, used_version: PolicyVersion = NO_VERSION) -> ExperienceState:
    """The state after ``records`` of a kept lineage, in order.

    Args:
        records: What is kept.
        used_version: Highest version that was published, in void parts too: none up to it is free.

    Raises:
        LifecycleError: A record is illegal where it stands; names its place in the log.
    """
    state = ExperienceState(used_version=used_version)
    for position, record in records:
        try:
            state.apply(position, record)
        except LifecycleError as error:
            raise LifecycleError(
                error.what,
                where=f"{error.where or record.key()} at log position {position.incarnation}"
                f"/{position.segment}/{position.offset}",
                rule=error.rule,
                way_out=error.way_out,
            ) from error
    return state


def rewound(records: Sequence[Placed], base: LogPosition | None) -> list[Placed]:
    """What is kept when a new incarnation starts from ``base``: decisions beyond it are void.

    Experience is never void, so the groups those decisions used become available again. None keeps
    everything.
    """
    if base is None:
        return list(records)
    return [
        (position, record) for position, record in records if not is_void(record, position, base)
    ]
