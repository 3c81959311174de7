"""What every rollout engine promises (spec C1, C2, C7)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from perdure.core.ids import PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import (
    GenerationChunk,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
)
from perdure.models import ModelConfig, Transformer, digest_weights, init_weights, weights_of
from perdure.rollout import EmbeddedEngine, EngineOptions, EnginePool

MODEL = ModelConfig(
    vocab_size=13,
    hidden_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate_size=40,
    tie_embeddings=False,
    max_positions=64,
)
MAX_TOKENS = 48
ONE, TWO = PolicyVersion(1), PolicyVersion(2)
Build = Callable[..., RolloutEngine]


def model_of(seed: int) -> Transformer:
    """A model whose outputs are far from uniform, so that a wrong position or key shows."""
    model = Transformer(MODEL)
    init_weights(model, seed)
    assert model.lm_head is not None
    with torch.no_grad():
        model.embed.weight.mul_(50)
        model.lm_head.weight.mul_(15)
    return model


MODELS = {ONE: model_of(1), TWO: model_of(2)}


@pytest.fixture(params=["embedded", "embedded deterministic", "pool of 1", "pool of 3"])
def build(request: pytest.FixtureRequest) -> Build:
    """Make an engine: ``slots`` at once (a pool: at least one each), chunks of ``chunk_tokens``."""
    members = {"pool of 1": 1, "pool of 3": 3}.get(request.param, 0)

    def make(*, slots: int = 4, chunk_tokens: int = 3) -> RolloutEngine:
        options = EngineOptions(
            slots=max(1, slots // (members or 1)),
            max_tokens=MAX_TOKENS,
            chunk_tokens=chunk_tokens,
            deterministic=request.param == "embedded deterministic",
        )
        if not members:
            return EmbeddedEngine(MODEL, options)
        return EnginePool({f"engine-{n}": EmbeddedEngine(MODEL, options) for n in range(members)})

    return make


def drive(engine: RolloutEngine, scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scenario on an engine that holds version 1; nothing may be left behind."""

    async def main() -> Any:
        await engine.load_weights(ONE, weights_of(MODELS[ONE]))
        try:
            return await asyncio.wait_for(scenario(), timeout=30)
        finally:
            await engine.close()
            assert asyncio.all_tasks() - {asyncio.current_task()} == set()

    return asyncio.run(main())


def request_of(name: str = "r", **changed: Any) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=changed.pop("budget", 20))
    base = GenerationRequest(name, (1, 2, 3, 4, 5), sampling, (7, len(name)))
    return replace(base, **changed)


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: np.ndarray[Any, Any]
    versions: tuple[int, ...]
    reason: StopReason | None


def join(chunks: list[GenerationChunk]) -> Answer:
    """Glue chunks together, checking what must hold of every stream."""
    assert all(chunk.stop_reason is None for chunk in chunks[:-1])
    assert all(chunk.token_ids.dtype == np.int32 for chunk in chunks)
    assert all(chunk.logprobs.dtype == np.float32 for chunk in chunks)
    assert all(chunk.token_ids.shape == chunk.logprobs.shape for chunk in chunks)
    assert all(len(chunk.token_ids) for chunk in chunks[:-1])
    return Answer(
        tuple(np.concatenate([chunk.token_ids for chunk in chunks]).tolist()),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        tuple(chunk.version for chunk in chunks for _ in chunk.token_ids),
        chunks[-1].stop_reason,
    )


async def answer(engine: RolloutEngine, request: GenerationRequest) -> Answer:
    return join([chunk async for chunk in engine.generate(request)])


def whole(build: Build, request: GenerationRequest) -> Answer:
    """The uninterrupted answer, alone in an engine."""
    engine = build()
    return drive(engine, lambda: answer(engine, request))


def expected_logprobs(request: GenerationRequest, tokens: tuple[int, ...]) -> list[float]:
    """Log-probabilities by a plain full forward, truncation spelled out token by token."""
    sampling = request.sampling
    sequence = torch.tensor([request.prompt_ids + request.prefix_ids + tokens])
    model = MODELS[ONE]
    with torch.no_grad():
        logits_TV = model.logits(model(sequence))[0, -len(tokens) - 1 : -1].double()
    found = []
    for logits_V, token in zip(logits_TV, tokens, strict=True):
        probs = (logits_V / (sampling.temperature or 1.0)).softmax(0).tolist()
        ranked = sorted(range(len(probs)), key=lambda index: -probs[index])
        if sampling.temperature:
            ranked = ranked[: sampling.top_k or len(ranked)]
            mass, kept = 0.0, []
            for index in ranked:
                if mass >= sampling.top_p * sum(probs[i] for i in ranked):
                    break
                kept.append(index)
                mass += probs[index]
        else:
            assert token == ranked[0]
            kept = list(range(len(probs)))
        assert token in kept
        found.append(float(np.log(probs[token] / sum(probs[index] for index in kept))))
    return found


SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=20),
    "warm": SamplingParams(temperature=1.7, max_new_tokens=20),
    "top-k": SamplingParams(temperature=0.8, top_k=3, max_new_tokens=20),
    "top-p": SamplingParams(top_p=0.7, max_new_tokens=20),
    "both": SamplingParams(temperature=1.3, top_k=5, top_p=0.9, max_new_tokens=20),
    "greedy": SamplingParams(temperature=0.0, top_k=4, top_p=0.2, max_new_tokens=20),
}


def test_a_stream_ends_at_its_budget(build: Build) -> None:
    engine = build(chunk_tokens=3)
    request = request_of(budget=8)

    async def collect() -> list[GenerationChunk]:
        return [chunk async for chunk in engine.generate(request)]

    chunks = drive(engine, collect)
    found = join(chunks)
    assert len(chunks) > 1
    assert len(found.tokens) == 8
    assert found.reason is StopReason.LENGTH
    assert found.versions == (ONE,) * 8


def test_a_stop_token_ends_the_answer_and_is_part_of_it(build: Build) -> None:
    free = whole(build, request_of())
    stop = free.tokens[6]
    cut = free.tokens.index(stop) + 1
    sampling = SamplingParams(max_new_tokens=20, stop_token_ids=(99, stop))
    found = whole(build, request_of(sampling=sampling))
    assert found.tokens == free.tokens[:cut]
    assert found.reason is StopReason.STOP


def test_a_stop_token_at_the_end_of_the_budget_is_a_stop(build: Build) -> None:
    free = whole(build, request_of(budget=1))
    sampling = SamplingParams(max_new_tokens=1, stop_token_ids=(free.tokens[0],))
    assert whole(build, request_of(sampling=sampling)).reason is StopReason.STOP


@pytest.mark.parametrize("name", SAMPLINGS)
def test_logprobs_are_those_of_a_plain_forward(build: Build, name: str) -> None:
    requests = [
        request_of(f"{name}{index}", sampling=SAMPLINGS[name], random_key=(3, index))
        for index in range(6)
    ]
    engine = build()

    async def everything() -> list[Answer]:
        return await asyncio.gather(*(answer(engine, request) for request in requests))

    for request, found in zip(requests, drive(engine, everything), strict=True):
        np.testing.assert_allclose(
            found.logprobs, expected_logprobs(request, found.tokens), atol=1e-5
        )


def test_tokens_depend_on_the_key_not_on_company_or_time(build: Build) -> None:
    requests = [
        request_of(
            f"r{index}",
            prompt_ids=tuple(range(1, 2 + index)),
            sampling=list(SAMPLINGS.values())[index % 6],
            random_key=(5, index),
        )
        for index in range(9)
    ]
    engine = build(slots=3)

    async def late(index: int) -> Answer:
        for _ in range(3 * index):
            await asyncio.sleep(0)
        return await answer(engine, requests[index])

    async def crowd() -> list[Answer]:
        return await asyncio.gather(*(late(index) for index in range(9)))

    for request, found in zip(requests, drive(engine, crowd), strict=True):
        alone = whole(build, request)
        assert found.tokens == alone.tokens
        np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-5)


def test_other_keys_give_other_answers(build: Build) -> None:
    answers = {whole(build, request_of(random_key=key)).tokens for key in ((1,), (2,), (1, 0))}
    assert len(answers) == 3
    assert all(len(set(tokens)) > 3 for tokens in answers)


def test_an_aborted_answer_continues_as_if_nothing_had_happened(build: Build) -> None:
    request = request_of(sampling=SAMPLINGS["both"])
    untouched = copy.deepcopy(request)
    expected = whole(build, request)
    engine = build(chunk_tokens=1)

    async def piecewise() -> tuple[Answer, int]:
        tokens: tuple[int, ...] = ()
        logprobs: list[float] = []
        attempts = 0
        while True:
            attempts += 1
            part, count = [], 0
            async for chunk in engine.generate(replace(request, prefix_ids=tokens)):
                part.append(chunk)
                count += 1
                if count == attempts and chunk.stop_reason is None:
                    assert await engine.abort(["r"]) == 1
            found = join(part)
            tokens += found.tokens
            logprobs += found.logprobs.tolist()
            assert len(tokens) <= 20
            if found.reason is not StopReason.ABORTED:
                return Answer(tokens, np.array(logprobs), (), found.reason), attempts

    found, attempts = drive(engine, piecewise)
    assert attempts > 2
    assert (found.tokens, found.reason) == (expected.tokens, StopReason.LENGTH)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert request == untouched


def test_a_continuation_stops_as_the_whole_would(build: Build) -> None:
    free = whole(build, request_of())
    stop = free.tokens[9]
    cut = free.tokens.index(stop) + 1
    sampling = SamplingParams(max_new_tokens=20, stop_token_ids=(stop,))
    for spent in range(cut):
        found = whole(build, request_of(sampling=sampling, prefix_ids=free.tokens[:spent]))
        assert found.tokens == free.tokens[spent:cut]
        assert found.reason is StopReason.STOP


def test_a_prefix_that_already_ends_is_answered_at_once(build: Build) -> None:
    sampling = SamplingParams(max_new_tokens=2, stop_token_ids=(9,))
    full = whole(build, request_of(sampling=sampling, prefix_ids=(4, 5)))
    stopped = whole(build, request_of(sampling=sampling, prefix_ids=(9,)))
    assert (full.tokens, full.reason) == ((), StopReason.LENGTH)
    assert (stopped.tokens, stopped.reason) == ((), StopReason.STOP)


def test_abort_of_all_returns_partials_of_running_and_waiting(build: Build) -> None:
    engine = build(slots=2, chunk_tokens=4)
    requests = [request_of(f"r{index}", budget=40) for index in range(5)]

    async def scenario() -> tuple[list[Answer], int, int]:
        tasks = [asyncio.create_task(answer(engine, request)) for request in requests]
        for _ in range(8):
            await asyncio.sleep(0)
        count = await engine.abort()
        return await asyncio.gather(*tasks), count, await engine.abort()

    found, count, again = drive(engine, scenario)
    assert (count, again) == (5, 0)
    assert all(each.reason is StopReason.ABORTED for each in found)
    running = engine.capabilities.slots
    assert [bool(each.tokens) for each in found] == [True] * running + [False] * (5 - running)
    for request, each in zip(requests, found, strict=True):
        assert each.tokens == whole(build, request).tokens[: len(each.tokens)]


def test_abort_names_its_requests(build: Build) -> None:
    engine = build()

    async def scenario() -> tuple[int, list[Answer]]:
        tasks = [asyncio.create_task(answer(engine, request_of(name))) for name in ("a", "b")]
        await asyncio.sleep(0)
        count = await engine.abort(["b", "b", "unknown"])
        return count, await asyncio.gather(*tasks)

    count, found = drive(engine, scenario)
    assert count == 1
    assert [each.reason for each in found] == [StopReason.LENGTH, StopReason.ABORTED]


def test_pause_holds_the_door_and_lets_running_ones_finish(build: Build) -> None:
    engine = build()

    async def scenario() -> tuple[bool, Answer, Answer]:
        running = asyncio.create_task(answer(engine, request_of("inside")))
        for _ in range(4):
            await asyncio.sleep(0)
        await engine.pause()
        waiting = asyncio.create_task(answer(engine, request_of("outside")))
        inside = await running
        for _ in range(20):
            await asyncio.sleep(0)
        held = not waiting.done()
        await engine.resume()
        return held, inside, await waiting

    held, inside, outside = drive(engine, scenario)
    assert held
    assert inside.tokens == whole(build, request_of("inside")).tokens
    assert outside.tokens == whole(build, request_of("outside")).tokens


def test_a_paused_request_can_be_aborted_without_being_served(build: Build) -> None:
    engine = build()

    async def scenario() -> Answer:
        await engine.pause()
        task = asyncio.create_task(answer(engine, request_of()))
        await asyncio.sleep(0)
        assert await engine.abort() == 1
        return await task

    found = drive(engine, scenario)
    assert (found.tokens, found.reason) == ((), StopReason.ABORTED)


def test_requests_wait_out_a_weight_change_behind_a_paused_door(build: Build) -> None:
    """A publication: pause, abort, sleep, wake, load, resume, go on from the prefix."""
    engine = build(chunk_tokens=2)
    request = request_of()

    async def scenario() -> tuple[Answer, Answer]:
        stream = engine.generate(request)
        parts = [await anext(stream)]
        await engine.pause()
        await engine.abort()
        parts += [chunk async for chunk in stream]
        first = join(parts)
        task = asyncio.create_task(answer(engine, replace(request, prefix_ids=first.tokens)))
        await asyncio.sleep(0)
        await engine.sleep()
        await engine.wake()
        await engine.load_weights(TWO, weights_of(MODELS[TWO]))
        assert not task.done()
        await engine.resume()
        return first, await task

    first, second = drive(engine, scenario)
    assert set(first.versions) == {ONE}
    assert set(second.versions) == {TWO}
    assert len(first.tokens) + len(second.tokens) == 20


def test_resuming_without_weights_fails_those_who_wait(build: Build) -> None:
    engine = build()

    async def scenario() -> None:
        await engine.pause()
        await engine.sleep()
        task = asyncio.create_task(answer(engine, request_of()))
        await asyncio.sleep(0)
        await engine.resume()
        with pytest.raises(RuntimeError, match="no weights"):
            await task

    drive(engine, scenario)


def test_sleep_wake_load_gives_the_same_engine_back(build: Build) -> None:
    engine = build()

    async def scenario() -> tuple[Answer, Answer]:
        before = await answer(engine, request_of())
        await engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            await answer(engine, request_of())
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.load_weights(ONE, weights_of(MODELS[ONE]))
        await engine.wake()
        with pytest.raises(RuntimeError, match="no weights"):
            await answer(engine, request_of())
        await engine.load_weights(ONE, weights_of(MODELS[ONE]))
        return before, await answer(engine, request_of())

    before, after = drive(engine, scenario)
    assert before.tokens == after.tokens
    assert before.logprobs.tobytes() == after.logprobs.tobytes()


def test_neither_sleep_nor_load_interrupts_running_requests(build: Build) -> None:
    engine = build(chunk_tokens=1)

    async def scenario() -> Answer:
        stream = engine.generate(request_of())
        parts = [await anext(stream)]
        with pytest.raises(RuntimeError, match="live"):
            await engine.sleep()
        with pytest.raises(RuntimeError, match="decoding"):
            await engine.load_weights(TWO, weights_of(MODELS[TWO]))
        return join(parts + [chunk async for chunk in stream])

    found = drive(engine, scenario)
    assert found.tokens == whole(build, request_of()).tokens
    assert set(found.versions) == {ONE}


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_load_copies_and_acknowledges_by_digest(build: Build, form: str) -> None:
    engine = build()

    async def scenario() -> tuple[str, Answer]:
        source = {name: tensor.clone() for name, tensor in weights_of(MODELS[TWO]).items()}
        given = source if form == "torch" else {k: v.numpy() for k, v in source.items()}
        digest = await engine.load_weights(TWO, given)
        for tensor in source.values():
            tensor.fill_(torch.nan)
        return digest, await answer(engine, request_of())

    digest, found = drive(engine, scenario)
    assert digest == digest_weights(weights_of(MODELS[TWO]))
    assert engine.version == TWO
    assert set(found.versions) == {TWO}


@pytest.mark.parametrize("flaw", ["missing", "extra", "shape", "dtype"])
def test_weights_that_do_not_fit_change_nothing(build: Build, flaw: str) -> None:
    engine = build()
    broken = {name: tensor.clone() for name, tensor in weights_of(MODELS[TWO]).items()}
    last = max(broken)
    if flaw == "missing":
        del broken[last]
    elif flaw == "extra":
        broken["surplus"] = torch.zeros(1)
    else:
        broken[last] = broken[last][:1] if flaw == "shape" else broken[last].double()

    async def scenario() -> Answer:
        with pytest.raises(ValueError, match=r"surplus|norm|blocks"):
            await engine.load_weights(TWO, broken)
        return await answer(engine, request_of())

    found = drive(engine, scenario)
    assert engine.version == ONE
    assert found.tokens == whole(build, request_of()).tokens


def test_a_duplicate_is_refused_and_the_first_goes_on(build: Build) -> None:
    engine = build(chunk_tokens=1)

    async def scenario() -> tuple[Answer, Answer]:
        stream = engine.generate(request_of())
        parts = [await anext(stream)]
        with pytest.raises(ValueError, match="live already"):
            await answer(engine, request_of())
        first = join(parts + [chunk async for chunk in stream])
        return first, await answer(engine, request_of())

    first, second = drive(engine, scenario)
    assert first.tokens == second.tokens == whole(build, request_of()).tokens


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_ids": ()},
        {"random_key": ()},
        {"prompt_ids": (1,) * (MAX_TOKENS - 19)},
        {"prompt_ids": (1, MODEL.vocab_size)},
        {"prefix_ids": (-1,)},
        {"prefix_ids": (1,) * 21},
        {"budget": 0},
        {"sampling": SamplingParams(temperature=-1.0)},
        {"sampling": SamplingParams(temperature=float("nan"))},
        {"sampling": SamplingParams(temperature=float("inf"))},
        {"sampling": SamplingParams(temperature=1e-9)},
        {"sampling": SamplingParams(top_k=-1)},
        {"sampling": SamplingParams(top_p=0.0)},
        {"sampling": SamplingParams(top_p=1.5)},
    ],
)
def test_requests_that_do_not_fit_are_refused(build: Build, changed: dict[str, Any]) -> None:
    engine = build()

    async def scenario() -> None:
        if "sampling" in changed:
            changed["sampling"] = replace(changed["sampling"], max_new_tokens=20)
        with pytest.raises(ValueError, match="request 'r'"):
            await answer(engine, request_of(**changed))
        assert await engine.abort() == 0

    drive(engine, scenario)


def test_the_longest_request_fits(build: Build) -> None:
    request = request_of(prompt_ids=(1,) * (MAX_TOKENS - 20))
    found = whole(build, request)
    assert len(found.tokens) == 20
    np.testing.assert_allclose(found.logprobs, expected_logprobs(request, found.tokens), atol=1e-5)


def test_closing_the_iterator_frees_the_slot(build: Build) -> None:
    engine = build(slots=1, chunk_tokens=1)

    async def scenario() -> Answer:
        stream = engine.generate(request_of("a", budget=40))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        return await answer(engine, request_of("b"))

    assert drive(engine, scenario).tokens == whole(build, request_of("b")).tokens


def test_cancelling_the_reader_frees_the_slot(build: Build) -> None:
    engine = build(slots=1)

    async def scenario() -> int:
        tasks = [asyncio.create_task(answer(engine, request_of(name))) for name in ("a", "b")]
        for _ in range(3):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await engine.sleep()
        return await engine.abort()

    assert drive(engine, scenario) == 0


def test_closing_the_engine_ends_every_stream(build: Build) -> None:
    engine = build(slots=1)

    async def scenario() -> None:
        tasks = [asyncio.create_task(answer(engine, request_of(name))) for name in ("a", "b")]
        for _ in range(3):
            await asyncio.sleep(0)
        await engine.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RuntimeError)
        for call in (
            answer(engine, request_of()),
            engine.wake(),
            engine.load_weights(TWO, weights_of(MODELS[TWO])),
        ):
            with pytest.raises(RuntimeError, match="closed"):
                await call

    drive(engine, scenario)


def test_capabilities_tell_the_truth(build: Build) -> None:
    engine = build(slots=3)
    assert engine.capabilities.sleep_frees_memory
    assert engine.capabilities.slots == 3
    assert engine.capabilities.max_tokens == MAX_TOKENS
