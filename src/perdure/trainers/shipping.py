"""The remote tier of a trained run, as its recipe names it."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.checkpoint.tier import ObjectStore
from perdure.core.clock import Clock
from perdure.core.events import EventSink, ignore_events
from perdure.core.faults import FaultHook
from perdure.core.storage_api import Storage
from perdure.runtime.remote import Remote, RemotePlan
from perdure.trainers.checkpoint_config import CheckpointConfig
from perdure.trainers.saving import rules_of

_KEY = "checkpoint.remote="


def remote_of(
    config: CheckpointConfig,
    *,
    clock: Clock,
    faults: FaultHook,
    events: EventSink = ignore_events,
    objects: ObjectStore | None = None,
) -> Remote | None:
    """Where the run is shipped to; None without a remote tier.

    Args:
        objects: In place of those at the address, for tests.
    """
    if config.remote is None:
        return None
    plan = RemotePlan(
        objects or config.remote,
        rules_of(config),
        config.remote_keep,
        config.log_ship_s,
        config.ship_at_end_s,
    )
    return Remote(plan, clock=clock, faults=faults, events=events)


def fetch_if_absent(
    storage: Storage,
    overrides: Sequence[str],
    *,
    clock: Clock,
    faults: FaultHook,
    objects: ObjectStore | None = None,
) -> None:
    """Bring a run back whose directory is lost, from the place that an override names.

    Raises:
        ConfigError: It names no such place.
        RemoteUnavailableError: The store does not answer; it may hold the run.
        DamagedError: What it holds cannot be brought back whole.
    """
    where = next((one.removeprefix(_KEY) for one in overrides if one.startswith(_KEY)), "")
    if where:
        plan = RemotePlan(objects or where)
        remote = Remote(plan, clock=clock, faults=faults, events=ignore_events)
        remote.fetch_if_absent(storage)
