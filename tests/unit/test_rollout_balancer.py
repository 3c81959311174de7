"""The balancer's cases, one by one."""

from __future__ import annotations

from perdure.rollout.balancer import Balancer


def balancer_of(*engines: str, sticky_requests: int = 100) -> Balancer:
    balancer = Balancer(sticky_requests=sticky_requests)
    for engine in engines:
        balancer.add(engine)
        balancer.admit(engine)
    return balancer


def place(balancer: Balancer, request: str) -> str:
    placement = balancer.place(request)
    assert placement is not None
    return placement.engine


def test_requests_spread_and_ties_go_to_the_first() -> None:
    balancer = balancer_of("a", "b", "c")
    assert [place(balancer, f"r{n}") for n in range(4)] == ["a", "b", "c", "a"]
    assert dict(balancer.in_flight) == {"a": 2, "b": 1, "c": 1}


def test_a_release_makes_room() -> None:
    balancer = balancer_of("a", "b")
    first = balancer.place("r0")
    place(balancer, "r1")
    assert first is not None
    balancer.release(first)
    assert place(balancer, "r2") == "a"


def test_a_known_id_goes_where_it_was_though_that_engine_has_more() -> None:
    balancer = balancer_of("a", "b")
    assert place(balancer, "turns") == "a"
    balancer.drain("b")
    place(balancer, "x")
    balancer.admit("b")
    assert place(balancer, "turns") == "a"
    assert dict(balancer.in_flight) == {"a": 3, "b": 0}


def test_ids_unused_for_longest_are_forgotten() -> None:
    balancer = balancer_of("a", "b", sticky_requests=2)
    assert [place(balancer, name) for name in ("r0", "r1", "r0", "r2")] == ["a", "b", "a", "b"]
    balancer.drain("a")
    balancer.admit("a")
    assert place(balancer, "r1") == "a", "r1 was forgotten; both have two, the first takes it"
    assert place(balancer, "r2") == "b"


def test_a_drained_engine_keeps_what_it_has_and_gets_nothing() -> None:
    balancer = balancer_of("a", "b")
    kept = balancer.place("r0")
    balancer.drain("a")
    assert [place(balancer, name) for name in ("r0", "r1", "r2")] == ["b", "b", "b"]
    assert balancer.in_flight["a"] == 1
    assert kept is not None
    balancer.release(kept)
    assert balancer.in_flight["a"] == 0


def test_an_engine_that_left_takes_its_affinity_along() -> None:
    balancer = balancer_of("a", "b")
    old = balancer.place("r0")
    balancer.remove("a")
    assert place(balancer, "r0") == "b"
    balancer.add("a")
    balancer.admit("a")
    assert old is not None
    balancer.release(old)
    assert dict(balancer.in_flight) == {"b": 1, "a": 0}


def test_without_an_open_engine_there_is_no_place() -> None:
    balancer = Balancer()
    assert balancer.place("r") is None
    balancer.add("a")
    assert balancer.place("r") is None
    balancer.admit("a")
    balancer.remove("a")
    balancer.remove("a")
    assert balancer.place("r") is None
