"""Which engine a request goes to: the one it knows, else the one with the least to do.

A pure policy: it counts and decides, and talks to nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """One request at one engine; given back once, with :meth:`Balancer.release`."""

    request_id: str
    engine: str


class Balancer:
    """Least in-flight with sticky affinity by request id; ties go to the engine added first.

    An engine that was removed and added again starts empty: what is still to be released from
    before counts for nobody.

    Args:
        sticky_requests: Request ids remembered; the one unused for longest is forgotten first.
    """

    def __init__(self, *, sticky_requests: int = 10_000) -> None:
        self._sticky_requests = sticky_requests
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._placed: dict[str, set[Placement]] = {}
        self._open: set[str] = set()

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Requests at each engine, in the order the engines were added."""
        return {engine: len(placed) for engine, placed in self._placed.items()}

    def add(self, engine: str) -> None:
        """A new engine; it takes no requests before :meth:`admit`.

        Raises:
            ValueError: There is one of that name.
        """
        if engine in self._placed:
            raise ValueError(f"there is an engine {engine!r} already; names are unique")
        self._placed[engine] = set()

    def admit(self, engine: str) -> None:
        """Send requests to it from now on. Raises ``KeyError`` if it is not known."""
        if engine not in self._placed:
            raise KeyError(engine)
        self._open.add(engine)

    def drain(self, engine: str) -> None:
        """Send it nothing new; what it has goes on. An unknown engine is drained already."""
        self._open.discard(engine)

    def remove(self, engine: str) -> None:
        """Forget it, what it has, and who knew it. An unknown engine is removed already."""
        self._open.discard(engine)
        if self._placed.pop(engine, None) is not None:
            known = [key for key, name in self._sticky.items() if name == engine]
            for key in known:
                del self._sticky[key]

    def place(self, request_id: str) -> Placement | None:
        """Choose an engine and count the request there; None: no engine takes requests."""
        if not self._open:
            return None
        engine = self._sticky.get(request_id)
        if engine not in self._open:
            open_engines = (name for name in self._placed if name in self._open)
            engine = min(open_engines, key=lambda name: len(self._placed[name]))
        self._remember(request_id, engine)
        placement = Placement(request_id, engine)
        self._placed[engine].add(placement)
        return placement

    def _remember(self, request_id: str, engine: str) -> None:
        self._sticky[request_id] = engine
        self._sticky.move_to_end(request_id)
        while len(self._sticky) > self._sticky_requests:
            self._sticky.popitem(last=False)

    def release(self, placement: Placement) -> None:
        """The request has left its engine. A second release, or of an engine gone, is nothing."""
        self._placed.get(placement.engine, set[Placement]()).discard(placement)
