"""Bounds of the remote tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.checkpoint.keep import Keep
from perdure.checkpoint.tier.objects import RetryPolicy
from perdure.core.clock import Clock
from perdure.core.errors import ConfigError
from perdure.core.events import EventSink, ignore_events
from perdure.core.faults import FaultHook, NoFaults


@dataclass(frozen=True, slots=True)
class TierOptions:
    """How much is done at once, how often, and how long it may take.

    Attributes:
        keep: Newest checkpoints that stay in the remote tier, or all rules of it.
        log_ship_s: The tail of the log is shipped at least this often; what a lost disk may cost.
        poll_s: How often the tier looks whether a log segment was finished.
        piece_bytes: Size of the objects that large files are cut into; those there stay so.
        parallel: Requests under way at once. So many pieces are in memory, one more when pulling.
        read_back: Read every stored piece and compare it before the pointer moves.
        call_timeout_s: Longest wait for one request, its repetitions included.
        close_timeout_s: How long closing goes on shipping what is missing.
        changing: Small files of the run that may be written again.
    """

    keep: int | Keep = 2
    log_ship_s: float = 30.0
    poll_s: float = 1.0
    piece_bytes: int = 16 << 20
    parallel: int = 4
    read_back: bool = True
    call_timeout_s: float = 900.0
    close_timeout_s: float = 60.0
    changing: tuple[str, ...] = ("config.yaml",)
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        _ = self.rules
        for name in ("piece_bytes", "parallel"):
            if getattr(self, name) < 1:
                raise _refused(name, getattr(self, name), "at least 1")
        for name in ("log_ship_s", "poll_s", "call_timeout_s", "close_timeout_s"):
            if not getattr(self, name) > 0:
                raise _refused(name, getattr(self, name), "above 0")

    @property
    def rules(self) -> Keep:
        """What stays in the remote tier."""
        return self.keep if isinstance(self.keep, Keep) else Keep(self.keep)


@dataclass(frozen=True, slots=True)
class TierContext:
    """What the tier is given from outside: time, faults, a listener, and its bounds.

    Attributes:
        events: Receives ``checkpoint_shipped``, ``log_shipped``, ``remote_failed``,
            ``remote_fenced``, ``pulled`` and ``checkpoint_damaged``.
        faults: Reached between the steps.
        address: Where the objects are, for people.
    """

    clock: Clock
    options: TierOptions = field(default_factory=TierOptions)
    events: EventSink = ignore_events
    faults: FaultHook = field(default_factory=NoFaults)
    address: str = ""


def _refused(name: str, value: object, rule: str) -> ConfigError:
    default = TierOptions.__dataclass_fields__[name].default
    return ConfigError(
        f"is {value}", where=f"remote.{name}", rule=rule, way_out=f"the default is {default}"
    )
