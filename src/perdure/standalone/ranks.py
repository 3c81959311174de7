"""Scripts of several ranks: who takes part, and what the first rank decides for all of them."""

from __future__ import annotations

import enum
import importlib
from typing import Any

from perdure.checkpoint import Manifest, Registry
from perdure.checkpoint.shares import split_name
from perdure.checkpoint.team import Team, alone
from perdure.core.clock import Clock
from perdure.standalone.world import World


class Safety(enum.StrEnum):
    """What all ranks do at a safe point."""

    GO_ON = "go on"
    SAVE = "save"
    SAVE_LAST = "save the last step"
    STOP = "save and stop"


def team_of(process_group: Any, *, timeout_s: float, clock: Clock) -> Team:
    """The ranks of a process group of torch; a team as it is; None: this process alone.

    Raises:
        ConfigError: This process is not in the group.
    """
    if process_group is None:
        return alone()
    if isinstance(process_group, Team):
        return process_group
    # Only a script that has torch can have a process group.
    ranks_of = importlib.import_module("perdure.checkpoint.torch_channel").ranks_of
    place, channel = ranks_of(process_group, clock=clock)
    return Team(place, channel, timeout_s)


def warn_of_regrouping(manifest: Manifest, world: World, registry: Registry) -> None:
    """Say which states of single ranks have no place, or no state, when their number changed."""
    size = world.team.place.size
    if manifest.ranks == size or not world.team.place.leads:
        return
    own = {entry.name for entry in registry.entries() if entry.per_rank}
    names = sorted({base for base, _ in map(split_name, manifest.components) if base in own})
    if not names:
        return
    if size > manifest.ranks:
        what = f"{_ranks(manifest.ranks, size - 1)} kept what the script gave"
    else:
        what = f"what {_ranks(size, manifest.ranks - 1)} stored has no place"
    world.events(
        "warning",
        {
            "message": f"saved by {_count(manifest.ranks)} and loaded by {_count(size)}: of"
            f" {', '.join(names)}, which every rank has for itself, {what}"
        },
    )


def _ranks(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
