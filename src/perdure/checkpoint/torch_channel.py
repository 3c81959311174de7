"""Messages between the ranks of a torch.distributed job, through the store that started it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from perdure.checkpoint.shares import RankPlace
from perdure.core.clock import Clock
from perdure.core.errors import ConfigError, TrainingError

EAGER_LOOKS = 32
"""How often a message is looked for before the first pause."""
FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02
_ANSWER_S = 60.0
"""Longest wait for the store itself."""


class StoreChannel:
    """A channel through a key-value store. It needs no collectives, so no order among threads.

    Args:
        store: What the process group was started with, or any other that all ranks reach.
        clock: Paces the looking.
    """

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def post(self, key: str, data: bytes) -> None:
        self._ask("set", key, data)

    def take(self, key: str, *, timeout_s: float) -> bytes:
        # The store's own waiting would keep its connection from every other thread.
        deadline_s = self._clock.monotonic_s() + timeout_s
        pause_s, looks = FIRST_PAUSE_S, 0
        while not self._ask("check", [key]):
            looks += 1
            if self._clock.monotonic_s() >= deadline_s:
                raise TimeoutError(key)
            if looks > EAGER_LOOKS:
                self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        data = bytes(self._ask("get", key))
        self._ask("delete_key", key)
        return data

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            raise TrainingError(
                f"the other ranks cannot be reached ({str(error).splitlines()[0]})",
                where="the store of the process group",
                rule="ranks save and restore together, through the store they were started with",
                way_out="see why the process that holds the store has ended; start all ranks again",
            ) from error


def ranks_of(group: dist.ProcessGroup, *, clock: Clock) -> tuple[RankPlace, StoreChannel]:
    """This rank's place in a process group, and a channel to its other ranks.

    Raises:
        ConfigError: Not a process group, or one that this process is not in.
    """
    if not isinstance(group, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"is a {type(group).__name__}",
            where="process_group",
            rule="a process group of torch.distributed",
            way_out="call init_process_group() and write process_group=dist.group.WORLD",
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(
            "this process is not in the group",
            where="process_group",
            rule="every rank of the group has an engine, and no other process",
            way_out="make the engine on the ranks of the group",
        )
    shared = PrefixStore("perdure", _store_of(group))
    # Every rank opens its engines in the same order: that gives each of them keys of its own.
    opened = shared.add(f"opened/{rank}", 1)
    store = PrefixStore(str(opened), shared)
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    return RankPlace(rank, dist.get_world_size(group)), StoreChannel(store, clock=clock)


def _store_of(group: dist.ProcessGroup) -> Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    # What torch had before it had a public way.
    return cast("Any", dist.distributed_c10d)._get_default_store()
