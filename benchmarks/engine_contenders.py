"""The engines that ``engine.py`` compares: perdure's own, and peers that are optional extras.

Each answers a :class:`Workload` with the log-probability of every sampled token, at temperature 1,
on the same weights (a Llama-shaped model, so that every peer computes it natively).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from perdure.core.ids import PolicyVersion
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import Transformer, weights_of
from perdure.rollout import EmbeddedEngine, EngineOptions

SLOTS, MAX_TOKENS = 64, 208


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests: prompts of equal length, and how many tokens each wants.

    Attributes:
        name: Row of the table.
        at_once: Requests in flight; when one ends the next arrives.
    """

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    at_once: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Answer:
    """Sampled tokens and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


class Contender(Protocol):
    """An engine with the model loaded."""

    name: str

    def run(self, workload: Workload) -> list[Answer]:
        """Answer every request, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that cannot run here, and why."""

    name: str
    reason: str


class Perdure:
    """The embedded engine, its asyncio streams included."""

    def __init__(self, model: Transformer, *, deterministic: bool = False) -> None:
        self.name = "perdure deterministic" if deterministic else "perdure"
        self._model, self._deterministic = model, deterministic
        self._engines: dict[int, EmbeddedEngine] = {}
        self._runs = 0

    def run(self, workload: Workload) -> list[Answer]:
        return asyncio.run(self._run(workload))

    async def _run(self, workload: Workload) -> list[Answer]:
        engine = await self._engine(workload.at_once)
        self._runs += 1
        door = asyncio.Semaphore(workload.at_once)

        async def answer(index: int) -> Answer:
            request = GenerationRequest(
                f"r{index}",
                tuple(workload.prompts[index]),
                SamplingParams(max_new_tokens=workload.lengths[index]),
                (self._runs, index),
            )
            found = Answer([], [])
            async with door:
                async for chunk in engine.generate(request):
                    found.tokens.extend(chunk.token_ids.tolist())
                    found.logprobs.extend(chunk.logprobs.tolist())
            return found

        return await asyncio.gather(*map(answer, range(len(workload.prompts))))

    async def _engine(self, slots: int) -> EmbeddedEngine:
        """An engine with as many slots as are in flight (decoding all slots is what costs)."""
        slots = slots if self._deterministic else SLOTS
        if slots not in self._engines:
            options = EngineOptions(
                slots=slots, max_tokens=MAX_TOKENS, deterministic=self._deterministic
            )
            self._engines[slots] = EmbeddedEngine(self._model.config, options)
            await self._engines[slots].load_weights(PolicyVersion(1), weights_of(self._model))
        return self._engines[slots]


class Generate:
    """``transformers`` ``generate``, padded: every batch runs until its longest answer ends."""

    def __init__(self, checkpoint: Path, cache: str) -> None:
        from transformers import AutoModelForCausalLM

        self.name = f"transformers generate, {cache} cache"
        self._cache = {"cache_implementation": cache}
        if cache == "static":
            self._cache["disable_compile"] = True
        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def run(self, workload: Workload) -> list[Answer]:
        found: list[Answer] = []
        for start in range(0, len(workload.prompts), workload.at_once):
            batch = slice(start, start + workload.at_once)
            found += self._batch(workload.prompts[batch], workload.lengths[batch])
        return found

    def _batch(self, prompts: list[list[int]], lengths: list[int]) -> list[Answer]:
        tokens_BT = torch.tensor(prompts)
        output = self._model.generate(
            tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **self._cache,
        )
        new_BT = output.sequences[:, tokens_BT.shape[1] :]
        logprobs_BTV = torch.stack(output.logits, dim=1).log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(2, new_BT[..., None])[..., 0]
        return [
            Answer(tokens[:length], logprobs[:length])
            for tokens, logprobs, length in zip(
                new_BT.tolist(), logprobs_BT.tolist(), lengths, strict=True
            )
        ]


class ContinuousBatching:
    """``transformers`` continuous batching; the next request is added when one ends."""

    name = "transformers continuous batching"

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True, top_k=0, max_new_tokens=MAX_TOKENS, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=SLOTS + 8,
                page_size=256,
                max_batch_tokens=SLOTS * 16,
                max_requests_per_batch=SLOTS,
                max_memory_percent=0.5,
                allow_block_sharing=False,
                return_logprobs=True,
            ),
        )
        self._manager.start()
        self._runs = 0

    def run(self, workload: Workload) -> list[Answer]:
        self._runs += 1
        found: dict[str, Answer] = {}
        names = [f"{self._runs}.{index}" for index in range(len(workload.prompts))]
        for index in range(min(workload.at_once, len(names))):
            self._add(names[index], workload, index)
        following = workload.at_once
        while len(found) < len(names):
            result = self._manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            found[result.request_id] = Answer(result.generated_tokens, result.logprobs)
            if following < len(names):
                self._add(names[following], workload, following)
                following += 1
        return [found[name] for name in names]

    def _add(self, name: str, workload: Workload, index: int) -> None:
        self._manager.add_request(
            workload.prompts[index], request_id=name, max_new_tokens=workload.lengths[index]
        )

    def close(self) -> None:
        self._manager.stop(block=True)


class VLLM:
    """vLLM's CPU build in this process; the next request is added when one ends."""

    def __init__(self, checkpoint: Path, *, compiled: bool) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        from vllm import LLM

        self.name = f"vLLM {'compiled' if compiled else 'eager'}"
        self._engine = LLM(
            str(checkpoint),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=not compiled,
            max_model_len=MAX_TOKENS,
            max_num_seqs=SLOTS,
            enable_prefix_caching=False,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        ).llm_engine
        torch.set_num_threads(1)
        self._runs = 0

    def run(self, workload: Workload) -> list[Answer]:
        self._runs += 1
        found: dict[str, Answer] = {}
        names = [f"{self._runs}.{index}" for index in range(len(workload.prompts))]
        following = 0
        while len(found) < len(names):
            while following < len(names) and following - len(found) < workload.at_once:
                self._add(names[following], workload, following)
                following += 1
            for output in self._engine.step():
                if output.finished:
                    found[output.request_id.split("-")[0]] = _vllm_answer(output.outputs[0])
        return [found[name] for name in names]

    def _add(self, name: str, workload: Workload, index: int) -> None:
        from vllm import SamplingParams as VLLMSampling

        sampling = VLLMSampling(
            max_tokens=workload.lengths[index], ignore_eos=True, logprobs=0, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": workload.prompts[index]}, sampling)


def _vllm_answer(output: Any) -> Answer:
    tokens = list(output.token_ids)
    pairs = zip(tokens, output.logprobs, strict=True)
    return Answer(tokens, [found[token].logprob for token, found in pairs])


def version_of(package: str) -> str | None:
    """Installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_contenders(
    model: Transformer, checkpoint: Path, *, every: bool
) -> tuple[list[Contender], list[Absent]]:
    """What can run here, perdure first, and what cannot.

    ``every`` adds settings that were slower than their siblings wherever they were measured.
    """
    found: list[Contender] = [Perdure(model), Perdure(model, deterministic=True)]
    absent: list[Absent] = []
    builders: list[tuple[str, str, Callable[[], Contender]]] = [
        ("transformers", "generate, dynamic cache", lambda: Generate(checkpoint, "dynamic")),
        ("transformers", "continuous batching", lambda: ContinuousBatching(checkpoint)),
        ("vllm", "compiled", lambda: VLLM(checkpoint, compiled=True)),
    ]
    if every:
        builders += [
            ("transformers", "generate, static cache", lambda: Generate(checkpoint, "static")),
            ("vllm", "eager", lambda: VLLM(checkpoint, compiled=False)),
        ]
    for package, what, build in builders:
        if version_of(package) is None and version_of(f"{package}-cpu") is None:
            absent.append(Absent(f"{package} {what}", "not installed"))
            continue
        try:
            found.append(build())
        except Exception as error:  # noqa: BLE001 - a peer that cannot start is named, not fatal
            absent.append(Absent(f"{package} {what}", f"{type(error).__name__}: {error}"[:200]))
    return found, absent


def quiet_peers() -> None:
    """Keep the table readable."""
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
