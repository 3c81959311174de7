"""The balancer against a plain account of what it was told."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perdure.rollout.balancer import Balancer, Placement

ENGINES = ("a", "b", "c")
REQUESTS = tuple(f"r{n}" for n in range(6))
STICKY = 3


class BalancerMachine(RuleBasedStateMachine):
    """Engines come, drain and go while requests are placed and released, twice at times."""

    def __init__(self) -> None:
        super().__init__()
        self.balancer = Balancer(sticky_requests=STICKY)
        self.known: dict[str, list[Placement]] = {}
        self.open: set[str] = set()
        self.stale: list[Placement] = []
        self.recent: dict[str, str] = {}

    @rule(engine=st.sampled_from(ENGINES))
    def add(self, engine: str) -> None:
        if engine in self.known:
            with pytest.raises(ValueError, match="already"):
                self.balancer.add(engine)
        else:
            self.balancer.add(engine)
            self.known[engine] = []

    @rule(engine=st.sampled_from(ENGINES))
    def admit(self, engine: str) -> None:
        if engine in self.known:
            self.balancer.admit(engine)
            self.open.add(engine)
        else:
            with pytest.raises(KeyError):
                self.balancer.admit(engine)

    @rule(engine=st.sampled_from(ENGINES))
    def drain(self, engine: str) -> None:
        self.balancer.drain(engine)
        self.open.discard(engine)

    @rule(engine=st.sampled_from(ENGINES))
    def remove(self, engine: str) -> None:
        self.balancer.remove(engine)
        self.open.discard(engine)
        self.stale += self.known.pop(engine, [])
        self.recent = {key: name for key, name in self.recent.items() if name != engine}

    @rule(request=st.sampled_from(REQUESTS))
    def place(self, request: str) -> None:
        placement = self.balancer.place(request)
        if not self.open:
            assert placement is None
            return
        assert placement is not None
        assert placement.request_id == request
        self.check_choice(placement)
        self.known[placement.engine].append(placement)
        self.recent.pop(request, None)
        self.recent[request] = placement.engine
        while len(self.recent) > STICKY:
            del self.recent[next(iter(self.recent))]

    def check_choice(self, placement: Placement) -> None:
        """Where it was, if that is open; else the first of those with the least to do."""
        assert placement.engine in self.open
        sticky = self.recent.get(placement.request_id)
        if sticky in self.open:
            assert placement.engine == sticky
            return
        loads = {name: len(placed) for name, placed in self.known.items() if name in self.open}
        least = min(loads.values())
        first = next(name for name, load in loads.items() if load == least)
        assert placement.engine == first

    @precondition(lambda self: any(self.known.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        placed = [each for all_placed in self.known.values() for each in all_placed]
        placement = data.draw(st.sampled_from(placed))
        self.balancer.release(placement)
        self.known[placement.engine].remove(placement)
        self.stale.append(placement)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        """Of an engine that left, or a second time: counts for nobody, whoever has the name now."""
        self.balancer.release(data.draw(st.sampled_from(self.stale)))

    @invariant()
    def every_request_counts_once(self) -> None:
        counted = {name: len(placed) for name, placed in self.known.items()}
        assert dict(self.balancer.in_flight) == counted
        assert list(self.balancer.in_flight) == list(self.known)


TestBalancer = BalancerMachine.TestCase
TestBalancer.settings = settings(max_examples=60, stateful_step_count=30)
