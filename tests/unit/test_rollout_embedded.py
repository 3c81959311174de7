from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from perdure.core.errors import ConfigError, TrainingError
from perdure.core.ids import PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import ModelConfig, Transformer, init_weights, weights_of
from perdure.rollout import EmbeddedEngine, EngineOptions
from perdure.rollout.decoder import Decoder

MODEL = ModelConfig(
    vocab_size=9, hidden_size=16, layers=1, heads=2, intermediate_size=24, max_positions=40
)


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    model = Transformer(MODEL)
    init_weights(model, seed)
    return weights_of(model)


def broken_weights() -> dict[str, torch.Tensor]:
    found = {name: tensor.clone() for name, tensor in weights().items()}
    found["norm.weight"][0] = torch.nan
    return found


def engine_of(**changed: Any) -> EmbeddedEngine:
    options = {"slots": 2, "max_tokens": 24, "chunk_tokens": 4} | changed
    return EmbeddedEngine(MODEL, EngineOptions.model_validate(options))


def request_of(name: str, budget: int = 12) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), SamplingParams(max_new_tokens=budget), (1, 2))


async def chunk_lengths(engine: EmbeddedEngine, request: GenerationRequest) -> list[int]:
    return [len(chunk.token_ids) async for chunk in engine.generate(request)]


def run(scenario: Callable[[EmbeddedEngine], Awaitable[Any]], **changed: Any) -> Any:
    async def main() -> Any:
        engine = engine_of(**changed)
        await engine.load_weights(PolicyVersion(1), weights())
        try:
            return await scenario(engine)
        finally:
            await engine.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(main())


def test_chunks_have_the_configured_size() -> None:
    lengths = run(lambda engine: chunk_lengths(engine, request_of("r", 11)), chunk_tokens=4)
    assert lengths == [4, 4, 3]


def test_options_are_bounded_and_must_fit_the_model() -> None:
    with pytest.raises(ValidationError):
        engine_of(slots=0)
    with pytest.raises(ValidationError):
        engine_of(max_token=3)
    with pytest.raises(ConfigError, match=r"max_tokens 41 exceeds max_positions 40.*way out"):
        engine_of(max_tokens=41)


def test_version_before_the_first_weights() -> None:
    assert engine_of().version == -1


def test_sleep_really_frees_weights_and_cache() -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        awake = engine.memory_bytes
        cache = 2 * MODEL.layers * 2 * 24 * MODEL.kv_heads * MODEL.head_dim * 4
        copies = weights()["blocks.0.attention.qkv.weight"].nbytes
        assert awake == cache + copies + sum(tensor.nbytes for tensor in weights().values())
        decoder = engine._decoder
        assert decoder is not None
        held = [
            weakref.ref(tensor)
            for tensor in (
                *decoder._model.parameters(),
                *decoder._forward.held,
                decoder._cache.keys,
                decoder._cache.values,
            )
        ]
        await chunk_lengths(engine, request_of("r"))
        del decoder
        await engine.sleep()
        gc.collect()
        assert engine.memory_bytes == 0
        assert all(reference() is None for reference in held)
        await engine.wake()
        assert engine.memory_bytes == awake

    run(scenario)


def test_sleeping_and_waking_twice_is_fine() -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        await engine.wake()
        await chunk_lengths(engine, request_of("still has weights"))
        for _ in range(2):
            await engine.sleep()
        for _ in range(2):
            await engine.wake()
        await engine.close()

    run(scenario)


@pytest.mark.parametrize("deterministic", [False, True])
def test_broken_weights_reach_every_stream_and_good_ones_heal(deterministic: bool) -> None:
    async def scenario(engine: EmbeddedEngine) -> tuple[list[int], list[int]]:
        before = await chunk_lengths(engine, request_of("before"))
        await engine.load_weights(PolicyVersion(2), broken_weights())
        tasks = [
            asyncio.create_task(chunk_lengths(engine, request_of(f"r{index}")))
            for index in range(5)
        ]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, TrainingError)
            assert "not finite" in str(result)
            assert isinstance(result.__cause__, TrainingError)
        await engine.load_weights(PolicyVersion(3), weights())
        return before, await chunk_lengths(engine, request_of("r0"))

    before, after = run(scenario, deterministic=deterministic)
    assert before == after


def test_sampling_parameters_of_a_failed_request_are_forgotten() -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)

    async def tokens(engine: EmbeddedEngine) -> list[int]:
        chunks = [chunk async for chunk in engine.generate(request_of("r"))]
        return [token for chunk in chunks for token in chunk.token_ids.tolist()]

    async def after_a_failure(engine: EmbeddedEngine) -> list[int]:
        await engine.load_weights(PolicyVersion(2), broken_weights())
        with pytest.raises(TrainingError, match="not finite"):
            await chunk_lengths(engine, GenerationRequest("g", (1, 2, 3), greedy, (1, 2)))
        await engine.load_weights(PolicyVersion(3), weights())
        return await tokens(engine)

    assert run(after_a_failure) == run(tokens)


def test_tokens_delivered_before_a_failure_are_not_taken_back() -> None:
    async def scenario(engine: EmbeddedEngine) -> int:
        stream = engine.generate(request_of("r"))
        delivered = len((await anext(stream)).token_ids)
        assert engine._decoder is not None
        engine._decoder._model.embed.weight.fill_(torch.nan)
        with pytest.raises(TrainingError, match="'r' failed in the rollout engine"):
            await anext(stream)
        return delivered

    assert run(scenario) == 4


def test_a_cancelled_decoding_task_reaches_every_stream() -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        tasks = [
            asyncio.create_task(chunk_lengths(engine, request_of(f"r{index}")))
            for index in range(3)
        ]
        for _ in range(3):
            await asyncio.sleep(0)
        assert engine._driver is not None
        engine._driver.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RuntimeError)
        assert await chunk_lengths(engine, request_of("r0")) == [4, 4, 4]

    run(scenario)


def test_no_task_lives_while_nothing_is_to_be_done() -> None:
    async def scenario(engine: EmbeddedEngine) -> None:
        await chunk_lengths(engine, request_of("a"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await engine.pause()
        waiting = asyncio.create_task(chunk_lengths(engine, request_of("b")))
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task(), waiting}
        await engine.abort()
        await waiting

    run(scenario)


def test_other_tasks_get_a_turn_after_every_step() -> None:
    async def scenario(engine: EmbeddedEngine) -> int:
        turns = 0
        task = asyncio.create_task(chunk_lengths(engine, request_of("r", 20)))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert run(scenario) >= 20


def test_one_engine_serves_several_event_loops_in_turn() -> None:
    engine = engine_of()

    async def first() -> list[int]:
        await engine.load_weights(PolicyVersion(1), weights())
        return await chunk_lengths(engine, request_of("r"))

    async def second() -> list[int]:
        found = await chunk_lengths(engine, request_of("r"))
        await engine.close()
        return found

    assert asyncio.run(first()) == asyncio.run(second())


def test_building_and_generating_leave_the_global_generators_alone() -> None:
    torch.manual_seed(11)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    engine_of()
    assert torch.equal(before, torch.get_rng_state())
    given = weights()
    before = torch.get_rng_state()

    async def scenario() -> None:
        engine = engine_of()
        await engine.load_weights(PolicyVersion(1), given)
        await chunk_lengths(engine, request_of("r"))
        await engine.close()

    asyncio.run(scenario())
    assert torch.equal(before, torch.get_rng_state())
    assert np.random.get_state()[1].tobytes() == numpy_before  # noqa: NPY002


def test_a_request_is_served_by_the_name_it_reuses() -> None:
    """A name is free again once its request ended, even before its stream was read to the end."""

    async def scenario(engine: EmbeddedEngine) -> None:
        stream = engine.generate(request_of("r"))
        await anext(stream)
        await engine.abort()
        second = asyncio.create_task(chunk_lengths(engine, request_of("r")))
        await asyncio.sleep(0)
        await stream.aclose()
        assert await second == [4, 4, 4]

    run(scenario)


@pytest.mark.parametrize("deterministic", [False, True])
def test_equal_prompts_are_computed_once(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(MODEL, EngineOptions(slots=6, max_tokens=40, deterministic=deterministic))
    decoder.load_weights(weights())
    shapes: list[tuple[int, ...]] = []
    prefill = decoder._forward.prefill

    def counted(tokens_BT: torch.Tensor, *rest: Any) -> None:
        shapes.append(tuple(tokens_BT.shape))
        prefill(tokens_BT, *rest)

    monkeypatch.setattr(decoder._forward, "prefill", counted)
    same, other = np.array([1, 2, 3, 4]), np.array([4, 3])
    decoder.prefill([(0, same), (1, same), (2, other), (5, same), (3, np.array([7]))])
    assert shapes == [(8, 16) if deterministic else (2, 3)]
    assert torch.equal(decoder._cache.keys[:, 0], decoder._cache.keys[:, 5])
    assert decoder._cache.keys[:, 2].any()
    assert not decoder._cache.keys[:, 3].any()


def test_a_stop_reason_of_a_full_budget_is_length() -> None:
    async def scenario(engine: EmbeddedEngine) -> StopReason | None:
        return [chunk async for chunk in engine.generate(request_of("r"))][-1].stop_reason

    assert run(scenario) is StopReason.LENGTH


def test_deterministic_bits_at_widths_where_the_number_of_rows_matters() -> None:
    """Matrix products of these widths round differently for few rows than for many."""
    shape = ModelConfig(
        vocab_size=16,
        hidden_size=128,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate_size=352,
        max_positions=40,
    )
    model = Transformer(shape)
    init_weights(model, 1)
    batch = [
        GenerationRequest(
            f"r{index}",
            tuple(range(1, 4 + index)),
            SamplingParams(max_new_tokens=6 + index, top_p=0.9),
            (1, index),
        )
        for index in range(11)
    ]

    async def read(engine: EmbeddedEngine, request: GenerationRequest) -> bytes:
        chunks = [chunk async for chunk in engine.generate(request)]
        return b"".join(chunk.token_ids.tobytes() + chunk.logprobs.tobytes() for chunk in chunks)

    async def main() -> tuple[list[bytes], list[bytes]]:
        engine = EmbeddedEngine(shape, EngineOptions(slots=6, max_tokens=32, deterministic=True))
        await engine.load_weights(PolicyVersion(1), weights_of(model))
        together = await asyncio.gather(*(read(engine, request) for request in batch))
        alone = [await read(engine, request) for request in batch]
        await engine.close()
        return together, alone

    together, alone = asyncio.run(main())
    assert together == alone


def test_bfloat16_weights_are_served_and_others_refused() -> None:
    given = {name: tensor.bfloat16() for name, tensor in weights().items()}

    async def main() -> list[int]:
        engine = engine_of(dtype="bfloat16")
        with pytest.raises(ValueError, match=r"torch.float32, the model holds .* torch.bfloat16"):
            await engine.load_weights(PolicyVersion(1), weights())
        await engine.load_weights(PolicyVersion(1), given)
        found = await chunk_lengths(engine, request_of("r"))
        await engine.close()
        return found

    assert asyncio.run(main()) == [4, 4, 4]
