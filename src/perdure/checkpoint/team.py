"""Several ranks that save together: one leads and commits, the others store their shares.

One save, its messages in order: every rank copies its state → the leader has made the directory
(``go``) → every rank's files are durable (``share``: what it stored, with checksums) → the leader
writes one manifest over all of them and commits → the outcome (``end``). A rank that cannot take
part says so in its ``share``; one that says nothing in time is missed: then nothing is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgpack

from perdure.checkpoint.manifest import ComponentEntry, Manifest, decode_manifest
from perdure.checkpoint.sharded import merged
from perdure.checkpoint.shares import ALONE, RankPlace, split_name
from perdure.core import errors
from perdure.core.errors import ConfigError, PerdureError, StorageError


class Channel(Protocol):
    """Messages between the ranks of one job. Thread-safe."""

    def post(self, key: str, data: bytes) -> None:
        """Leave a message, in place of one under that key; never waits for whoever takes it.

        Raises:
            TrainingError: The others cannot be reached.
        """
        ...

    def take(self, key: str, *, timeout_s: float) -> bytes:
        """Wait for a message and take it away.

        Raises:
            TimeoutError: It did not come.
            TrainingError: The others cannot be reached.
        """
        ...


@dataclass(slots=True)
class Team:
    """The ranks that save together, as one of them sees it.

    Every rank makes the same calls of :meth:`tell` and :meth:`gather` in the same order, and stages
    the same checkpoints.

    Attributes:
        place: Which rank this is.
        channel: How it talks to the others.
        timeout_s: Longest wait for another rank.
    """

    place: RankPlace
    channel: Channel
    timeout_s: float = 600.0
    _told: int = field(default=0, init=False)
    _turns: int = field(default=0, init=False)

    def tell(self, say: Callable[[], Any]) -> Any:
        """What ``say`` returns on the leader, on every rank; it is called there only.

        Args:
            say: Returns what msgpack can hold.

        Raises:
            PerdureError: What ``say`` has raised, on every rank; ``TrainingError`` if the leader
                says nothing in time.
        """
        if not self.place.leads:
            return self.hear()
        self._told += 1
        key = f"tell/{self._told}"
        try:
            message: dict[str, Any] = {"value": say()}
        except BaseException as error:
            self.post_to_all(key, _failure(error))
            raise
        self.post_to_all(key, message)
        return message["value"]

    def hear(self) -> Any:
        """What the leader tells; for the other ranks. Raises as :meth:`tell`."""
        self._told += 1
        return _value_of(self.take(f"tell/{self._told}/{self.place.rank}", source=0))

    def together(self, do: Callable[[], Any]) -> list[Any]:
        """Do something on every rank and wait for all of them.

        Args:
            do: Returns what msgpack can hold.

        Returns:
            What it has returned, in the order of ranks.

        Raises:
            PerdureError: What it has raised here, or else on the first rank where it has.
        """
        failed: BaseException | None = None
        try:
            mine = {"value": do()}
        except BaseException as error:  # noqa: BLE001 - raised below, when all have learned of it
            failed, mine = error, _failure(error)
        self._told += 1
        key = f"join/{self._told}"
        answers = [mine]
        if self.place.leads:
            answers += self.answers(key)
            self.post_to_all(key + "/all", {"value": answers})
        else:
            self.channel.post(f"{key}/{self.place.rank}", msgpack.packb(mine))
        if failed is not None:
            raise failed
        if not self.place.leads:
            answers = _value_of(self.take(f"{key}/all/{self.place.rank}", source=0, patience=2))
        return [_value_of(answer) for answer in answers]

    def leave(self, reason: str) -> None:
        """Leader: nothing more will be told; whoever waits for it learns so."""
        gone = errors.StoppedError(reason, where="rank 0", way_out="start all ranks again")
        self.post_to_all(f"tell/{self._told + 1}", _failure(gone))

    def ask(self, what: str) -> None:
        """Another rank: let the leader know what this one wants."""
        self.channel.post(f"ask/{what}", b"")

    def asked(self, what: str) -> bool:
        """Leader: whether another rank wants it and has not been answered so; never waits."""
        if self.place.size == 1:
            return False
        try:
            self.channel.take(f"ask/{what}", timeout_s=0.0)
        except TimeoutError:
            return False
        return True

    def next_turn(self) -> Turn:
        """The next save, which all ranks begin now."""
        self._turns += 1
        return Turn(self, f"save/{self._turns}")

    def answers(self, key: str) -> list[dict[str, Any]]:
        """What every other rank has answered; silence is an answer, and is waited for once."""
        answers: list[dict[str, Any]] = []
        patience = 1.0
        for rank in range(1, self.place.size):
            try:
                answers.append(self.take(f"{key}/{rank}", source=rank, patience=patience))
            except PerdureError as error:
                answers.append(_failure(error))
                patience = 0.0
        return answers

    def post_to_all(self, key: str, message: Mapping[str, Any]) -> None:
        """Leader: a message to every other rank."""
        if self.place.size == 1:
            return
        data = msgpack.packb(message)
        for rank in range(1, self.place.size):
            self.channel.post(f"{key}/{rank}", data)

    def take(self, key: str, *, source: int, patience: float = 1.0) -> dict[str, Any]:
        """Wait for a message of ``source``, up to ``patience`` times the longest wait."""
        limit_s = self.timeout_s * patience
        try:
            return msgpack.unpackb(self.channel.take(key, timeout_s=limit_s), strict_map_key=False)
        except TimeoutError as error:
            raise errors.TrainingError(
                f"rank {source} was waited for {self.timeout_s:g} s in vain ({key})",
                where=f"rank {self.place.rank}",
                rule="ranks save and restore together, and nobody waits forever",
                way_out="see why it ended or hangs, and start all ranks again",
            ) from error


class _Nobody:
    """The channel of a rank without others."""

    def post(self, key: str, data: bytes) -> None:
        del data
        raise AssertionError(f"{key}: there is nobody to tell")

    def take(self, key: str, *, timeout_s: float) -> bytes:
        del timeout_s
        raise AssertionError(f"{key}: there is nobody to hear from")


def alone() -> Team:
    """The team of a process that saves alone."""
    return Team(ALONE, _Nobody())


@dataclass(slots=True)
class Turn:
    """One save of all ranks. The leader's methods and the others' are called by them only."""

    team: Team
    key: str
    _opened: bool = field(default=False, init=False)

    @property
    def rank(self) -> int:
        return self.team.place.rank

    @property
    def leads(self) -> bool:
        return self.team.place.leads

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.team.place.size == 1

    def open(self) -> None:
        """Leader: the directory is there."""
        self._opened = True
        self.team.post_to_all(f"{self.key}/go", {"value": None})

    def complete(self, own: Manifest, agreement: Mapping[str, str]) -> Manifest:
        """Leader: wait for all shares, and put them together.

        Raises:
            StorageError: A rank could not store its share, or shares do not make a whole.
            ConfigError: What must be the same on all ranks is not.
            TrainingError: A rank said nothing in time.
        """
        answers = [_value_of(answer) for answer in self.team.answers(f"{self.key}/share")]
        require_agreement([agreement, *(answer["agreement"] for answer in answers)])
        shares = [
            decode_manifest(answer["manifest"], where=f"share of rank {rank}")
            for rank, answer in enumerate(answers, start=1)
        ]
        return put_together(own, shares)

    def close(self, error: BaseException | None) -> None:
        """Leader: how it ended."""
        message = {"value": None} if error is None else _failure(error)
        self.team.post_to_all(f"{self.key}/{'end' if self._opened else 'go'}", message)

    def decline(self, error: PerdureError) -> None:
        """Any rank: there is nothing to store here, so there will be no checkpoint."""
        if self.leads:
            self.close(error)
        else:
            self.team.channel.post(f"{self.key}/share/{self.rank}", msgpack.packb(_failure(error)))

    def share(self, store: Callable[[], Manifest], agreement: Mapping[str, str]) -> None:
        """Another rank: store its share when the leader is ready; return when all is committed.

        Args:
            store: Makes this rank's files durable.
            agreement: Component → digest of what must be the same on all ranks.

        Raises:
            PerdureError: There is no checkpoint, and why.
            OSError: The storage has refused.
        """
        rank = self.rank
        _value_of(self.team.take(f"{self.key}/go/{rank}", source=0))
        failed: Exception | None = None
        try:
            stored = store()
            mine = {"value": {"manifest": stored.encode(), "agreement": dict(agreement)}}
        except (PerdureError, OSError) as error:
            failed, mine = error, _failure(error, where=f"rank {rank}")
        self.team.channel.post(f"{self.key}/share/{rank}", msgpack.packb(mine))
        ended = self.team.take(f"{self.key}/end/{rank}", source=0, patience=2)
        if failed is not None:
            raise failed
        _value_of(ended)


def require_agreement(agreements: Sequence[Mapping[str, str]]) -> None:
    """Refuse states that should be the same on all ranks and are not.

    Args:
        agreements: Component → digest, of every rank.

    Raises:
        ConfigError: Names the component and the first rank that differs from rank 0.
    """
    first = agreements[0]
    for rank, other in enumerate(agreements):
        for component in sorted(first.keys() | other.keys()):
            if first.get(component) == other.get(component):
                continue
            absent = next((r for r, a in ((0, first), (rank, other)) if component not in a), None)
            raise ConfigError(
                f"is not the same on ranks 0 and {rank}"
                if absent is None
                else f"is not registered on rank {absent}",
                where=f"component {component}",
                rule="what is not spread over the ranks is stored once, for all of them",
                way_out="if every rank has its own, say so: engine.add(name, part, per_rank=True)",
            )


def put_together(own: Manifest, shares: Sequence[Manifest]) -> Manifest:
    """One manifest over the leader's files and those of the other ranks.

    Raises:
        ConfigError: Parts are registered on some ranks only, or parts of tensors do not fit.
    """
    components = dict(own.components)
    files = dict(own.files)
    for rank, share in enumerate(shares, start=1):
        files |= share.files
        for name, entry in share.components.items():
            if name not in components:
                if split_name(name)[1] != rank:
                    raise _do_not_fit(name, f"is registered on rank {rank} only")
                components[name] = entry
                continue
            components[name] = _joined(name, components[name], entry)
    whole = replace(
        own,
        components=components,
        features=tuple(dict.fromkeys([*own.features, *(f for s in shares for f in s.features)])),
        arena_bytes=max(manifest.arena_bytes for manifest in (own, *shares)),
    ).with_files(files)
    if whole.sharding_problem:
        raise _do_not_fit("", whole.sharding_problem)
    return whole


def _joined(name: str, one: ComponentEntry, other: ComponentEntry) -> ComponentEntry:
    if (one.kind, one.schema_version) != (other.kind, other.schema_version):
        raise _do_not_fit(name, "has other kinds or schema versions on two ranks")
    try:
        return replace(one, shards=merged([one.shards, other.shards]))
    except ValueError as error:
        raise _do_not_fit(name, str(error)) from error


def _do_not_fit(component: str, what: str) -> ConfigError:
    return ConfigError(
        what,
        where=f"component {component}" if component else "checkpoint",
        rule="the parts that all ranks store make up every tensor exactly once",
        way_out="build and register the same model on all ranks",
    )


def _failure(error: BaseException, *, where: str = "") -> dict[str, Any]:
    """An error as a message; what is no error of perdure's arrives as a storage error."""
    if isinstance(error, PerdureError):
        place = ", ".join(part for part in (where, error.where) if part)
        return {"error": [type(error).__name__, error.what, place, error.rule, error.way_out]}
    kind = StorageError if isinstance(error, OSError) else errors.TrainingError
    return {"error": [kind.__name__, f"{type(error).__name__}: {error}", where, "", ""]}


def _value_of(message: Mapping[str, Any]) -> Any:
    """What a message says. Raises the error that it carries."""
    if "error" not in message:
        return message["value"]
    name, what, where, rule, way_out = message["error"]
    kind = getattr(errors, name, StorageError)
    raise kind(what, where=where, rule=rule, way_out=way_out)
