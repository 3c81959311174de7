"""What every weight transport promises, with real engines at its end (spec F1, F2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perdure.core.errors import FencedError, TrainingError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import ModelConfig, Transformer, digest_weights, init_weights, weights_of
from perdure.publish import FileTransport, InProcessTransport, Publication
from perdure.rollout import EmbeddedEngine, EngineOptions, EnginePool
from perdure.storage import FaultyStorage, PosixStorage, StorageFault, StorageFaultKind

MODEL = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate_size=24,
    tie_embeddings=True,
    max_positions=32,
)
ONE, TWO = PolicyVersion(1), PolicyVersion(2)


def weights(seed: int) -> dict[str, torch.Tensor]:
    model = Transformer(MODEL)
    init_weights(model, seed)
    return {name: tensor.clone() for name, tensor in weights_of(model).items()}


def engine_of() -> EmbeddedEngine:
    return EmbeddedEngine(MODEL, EngineOptions(slots=2, max_tokens=32, chunk_tokens=2))


@pytest.fixture(params=["in process", "file"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Publication]:
    def make(pool: EnginePool, *, incarnation: int = 1) -> Publication:
        transport = (
            FileTransport(tmp_path / f"weights-{incarnation}")
            if request.param == "file"
            else InProcessTransport()
        )
        return Publication(pool, transport, incarnation=IncarnationNumber(incarnation))

    return make


def drive(scenario: Callable[[EnginePool], Awaitable[Any]], *, engines: int = 2) -> Any:
    async def main() -> Any:
        pool = EnginePool({f"engine-{n}": engine_of() for n in range(engines)})
        try:
            return await asyncio.wait_for(scenario(pool), timeout=30)
        finally:
            await pool.close()
            assert asyncio.all_tasks() - {asyncio.current_task()} == set()

    return asyncio.run(main())


def request_of(name: str, *, budget: int = 20) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), SamplingParams(max_new_tokens=budget), (4, 2))


def test_every_engine_holds_what_was_published(build: Callable[..., Publication]) -> None:
    published = weights(1)

    async def scenario(pool: EnginePool) -> None:
        publication = build(pool)
        digest = digest_weights(published)
        found = await publication.publish(ONE, weights=published, digest=digest)
        assert (found.engines, found.missing) == (("engine-0", "engine-1"), {})
        assert pool.version == publication.version == ONE
        for tensor in published.values():
            tensor.fill_(torch.nan)
        for n in range(2):
            chunks = [chunk async for chunk in pool.generate(request_of(f"r{n}"))]
            assert {chunk.version for chunk in chunks} == {ONE}
            assert sum(len(chunk.token_ids) for chunk in chunks) == 20
        await publication.close()

    drive(scenario)


def test_running_requests_go_on_under_the_new_version(build: Callable[..., Publication]) -> None:
    async def scenario(pool: EnginePool) -> list[int]:
        publication = build(pool)
        first, second = weights(1), weights(2)
        await publication.publish(ONE, weights=first, digest=digest_weights(first))
        stream = pool.generate(request_of("r"))
        chunks = [await anext(stream), await anext(stream)]
        await pool.interrupt()
        await publication.publish(TWO, weights=second, digest=digest_weights(second))
        await pool.resume()
        chunks += [chunk async for chunk in stream]
        await publication.close()
        return [chunk.version for chunk in chunks for _ in chunk.token_ids]

    versions = drive(scenario, engines=1)
    assert len(versions) == 20
    assert versions == sorted(versions)
    assert set(versions) == {ONE, TWO}


def test_other_bytes_than_those_meant_serve_nobody(build: Callable[..., Publication]) -> None:
    async def scenario(pool: EnginePool) -> None:
        publication = build(pool)
        with pytest.raises(TrainingError, match="no engine acknowledged"):
            await publication.publish(ONE, weights=weights(1), digest="0" * 32)
        assert {report.state.value for report in pool.describe()} == {"quarantined"}
        good = weights(1)
        await publication.publish(ONE, weights=good, digest=digest_weights(good))
        assert {report.state.value for report in pool.describe()} == {"serving"}
        await publication.close()

    drive(scenario)


def test_an_engine_that_comes_later_catches_up(build: Callable[..., Publication]) -> None:
    async def scenario(pool: EnginePool) -> None:
        publication = build(pool)
        assert not await publication.catch_up("engine-0")
        first, second = weights(1), weights(2)
        await publication.publish(ONE, weights=first, digest=digest_weights(first))
        await publication.publish(TWO, weights=second, digest=digest_weights(second))
        late = engine_of()
        pool.add("late", late)
        assert pool.describe()[-1].state.value == "quarantined"
        assert await publication.catch_up("late")
        assert late.version == TWO
        assert pool.describe()[-1].state.value == "serving"
        await publication.close()

    drive(scenario)


def test_a_lower_incarnation_is_refused(build: Callable[..., Publication]) -> None:
    given = weights(1)

    async def scenario(pool: EnginePool) -> None:
        newer, older = build(pool, incarnation=3), build(pool, incarnation=2)
        await newer.publish(ONE, weights=given, digest=digest_weights(given))
        with pytest.raises(FencedError, match="incarnation 2 publishes .* serves incarnation 3"):
            await older.publish(TWO, weights=given, digest=digest_weights(given))
        assert pool.version == ONE
        await newer.publish(TWO, weights=given, digest=digest_weights(given))
        assert {report.state.value for report in pool.describe()} == {"serving"}
        await newer.close()
        await older.close()

    drive(scenario)


def test_the_file_goes_when_it_is_superseded_and_at_the_end(tmp_path: Path) -> None:
    directory = tmp_path / "weights"

    async def scenario(pool: EnginePool) -> None:
        publication = Publication(pool, FileTransport(directory))
        directory.mkdir()
        (directory / "weights-0-7-1").write_bytes(b"of a process that died")
        for version in (1, 2, 3):
            given = weights(version)
            await publication.publish(
                PolicyVersion(version), weights=given, digest=digest_weights(given)
            )
            assert [path.name for path in directory.iterdir()] == [f"weights-0-{version}-{version}"]
        await publication.close()

    drive(scenario)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_refuses_bytes_that_were_not_meant(tmp_path: Path) -> None:
    """The engine keeps what it had, out of traffic; the next publication brings it back."""
    directory = tmp_path / "weights"

    flip = StorageFault(StorageFaultKind.FLIP_WRITE, path_contains="weights-")
    storage = FaultyStorage(PosixStorage(tmp_path), plan=[flip])

    async def scenario(pool: EnginePool) -> None:
        publication = Publication(pool, FileTransport(directory, storage=storage))
        given = weights(1)
        with pytest.raises(TrainingError, match="have checksum"):
            await publication.publish(ONE, weights=given, digest=digest_weights(given))
        assert {engine.version for engine in pool.takers.values()} == {-1}
        await publication.publish(ONE, weights=given, digest=digest_weights(given))
        await publication.close()

    drive(scenario)
    assert storage.fired[StorageFaultKind.FLIP_WRITE] == 1


def test_numpy_weights_go_through_a_file_too(tmp_path: Path) -> None:
    given = weights(1)
    arrays: dict[str, np.ndarray[Any, Any]] = {k: v.numpy() for k, v in given.items()}

    async def scenario(pool: EnginePool) -> None:
        publication = Publication(pool, FileTransport(tmp_path / "weights"))
        await publication.publish(ONE, weights=arrays, digest=digest_weights(given))
        await publication.close()

    drive(scenario)
