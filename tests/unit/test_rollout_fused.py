"""The fused pass over a cache against the model's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.models import ModelConfig, Transformer, init_weights
from perdure.rollout.forward import GraphedForward, ModelForward
from perdure.rollout.fused import FusedForward
from perdure.rollout.kv_cache import KVCache
from perdure.rollout.products import MIN_MACS, Product, mkl_runs_on_intel

BASE: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 24,
    "layers": 2,
    "heads": 4,
    "intermediate_size": 37,
    "max_positions": 40,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "tie_embeddings": False},
    "biased": {"kv_heads": 2, "qkv_bias": True},
    "normed heads": {"kv_heads": 2, "qk_norm": True, "head_dim": 10},
    "large eps": {"rms_norm_eps": 0.5, "qk_norm": True},
}
SLOTS, TOKENS, PROMPT = 40, 32, 7


def model_of(changed: dict[str, Any]) -> Transformer:
    """Every weight, those of norms and biases included, is random."""
    model = Transformer(ModelConfig.model_validate(BASE | changed))
    init_weights(model, 1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
        model.embed.weight.mul_(50)
    return model.requires_grad_(False)


def cache_of(model: Transformer, device: str = "cpu") -> KVCache:
    return KVCache(model.config, slots=SLOTS, max_tokens=TOKENS, device=torch.device(device))


def fused_of(model: Transformer, *, placeless: bool = False) -> FusedForward:
    fused = FusedForward(model, cache_of(model), placeless=placeless)
    fused.refresh()
    return fused


def tokens_of(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, BASE["vocab_size"], (rows, length), generator=generator)


_USES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 150)), max_size=4)


@given(cycles=st.lists(_USES, max_size=4))
def test_what_is_used_of_a_cache_holds_nothing_from_before_it_was_cleared(
    cycles: list[list[tuple[int, int]]],
) -> None:
    config = ModelConfig.model_validate(BASE | {"layers": 1})
    cache = KVCache(config, slots=5, max_tokens=150, device=torch.device("cpu"))
    for uses in cycles:
        used_slots = used_tokens = 0
        for slots, tokens in uses:
            before = cache.keys[:, :used_slots, ..., :used_tokens].clone()
            cache.note_use(slots, tokens)
            # What was written since the cache was cleared stays.
            assert cache.keys[:, :used_slots, ..., :used_tokens].equal(before)
            used_slots, used_tokens = max(used_slots, slots), max(used_tokens, tokens)
            assert cache.keys[:, :used_slots, ..., :used_tokens].isfinite().all()
            assert cache.values[:, :used_slots, :, :used_tokens].isfinite().all()
            cache.keys[:, :slots, ..., :tokens].fill_(1)
            cache.values[:, :slots, :, :tokens].fill_(1)
        # All that may be written holds what broken weights leave.
        cache.keys[:, :used_slots, ..., :used_tokens].fill_(torch.nan)
        cache.values[:, :used_slots, :, :used_tokens].fill_(torch.nan)
        cache.clear()


def test_only_what_was_used_of_a_cache_is_cleared() -> None:
    config = ModelConfig.model_validate(BASE | {"layers": 1})
    cache = KVCache(config, slots=4, max_tokens=256, device=torch.device("cpu"))
    cache.note_use(3, 60)
    cache.clear()
    cache.keys.fill_(1)
    cache.values.fill_(1)
    cache.note_use(4, 200)
    for cached in (cache.keys, cache.values.transpose(-1, -2)):
        assert not cached[:, :3, ..., :64].count_nonzero()
        assert cached.count_nonzero() == cached.numel() * (1 - 3 * 64 / (4 * 256))


def decode(forward: Any, tokens_NT: torch.Tensor, bands: Any) -> torch.Tensor:
    """Logits behind every token from ``PROMPT`` on; what comes before is prefilled."""
    rows = len(tokens_NT)
    slots = torch.arange(rows, device=tokens_NT.device)
    forward.prefill(tokens_NT[:, :PROMPT].contiguous(), slots, slots)
    found = []
    for position in range(PROMPT, tokens_NT.shape[1]):
        places = torch.full((rows,), position, device=tokens_NT.device)
        found.append(forward.step(tokens_NT[:, position].contiguous(), places, bands).clone())
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("placeless", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_logits_are_those_of_the_model(shape: str, placeless: bool, rows: int) -> None:
    model = model_of(SHAPES[shape])
    tokens_NT = tokens_of(rows, 15)
    with torch.inference_mode():
        expected = model.logits(model(tokens_NT))[:, PROMPT:]
        found = decode(fused_of(model, placeless=placeless), tokens_NT, ((rows, 16),))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("forward", [FusedForward, ModelForward])
def test_rows_at_different_places_see_their_own_past_only(forward: type) -> None:
    """Rows stand at different positions, in bands that see as much as their longest row needs."""
    model = model_of(SHAPES["grouped"])
    passes = forward(model, cache_of(model))
    tokens_NT = tokens_of(3, 20)
    ends = (19, 12, 9)
    with torch.inference_mode():
        passes.refresh()
        slots = torch.arange(3)
        passes.prefill(tokens_NT, slots, slots)
        feeding = torch.stack([tokens_NT[row, end] for row, end in enumerate(ends)])
        found = passes.step(feeding, torch.tensor(ends), ((1, 20), (2, 13), (3, 16)))
        whole = model.logits(model(tokens_NT))
    expected = torch.stack([whole[row, end] for row, end in enumerate(ends)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_weights_are_taken_over_by_refresh() -> None:
    model = model_of(SHAPES["normed heads"])
    fused, tokens_NT = fused_of(model), tokens_of(2, 12)
    with torch.inference_mode():
        before = decode(fused, tokens_NT, ((2, 16),))
        for parameter in model.parameters():
            parameter.mul_(1.25)
        fused.refresh()
        after = decode(fused, tokens_NT, ((2, 16),))
        expected = model.logits(model(tokens_NT))[:, PROMPT:]
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, after, atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [2, 3, 20, 33])
def test_equal_rows_have_equal_bits_wherever_they_stand(shape: str, rows: int) -> None:
    """With widths at which MKL rounds rows by their place."""
    fused = fused_of(model_of(SHAPES[shape]), placeless=True)
    tokens_NT = tokens_of(1, 14).expand(rows, -1).contiguous()
    with torch.inference_mode():
        found = decode(fused, tokens_NT, ((rows, TOKENS),))
    assert torch.equal(found, found[:1].expand_as(found))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("placeless", [False, True])
@pytest.mark.parametrize("cpu_name", ["Intel Xeon", "AMD EPYC", None])
def test_products_by_either_library(
    cpu_name: str | None,
    biased: bool,
    many: bool,
    placeless: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found_by_torch = {} if cpu_name is None else {"cpu_name": cpu_name}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found_by_torch, raising=False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator)
    bias = torch.randn(96, generator=generator) if biased else None
    rows = MIN_MACS // weight.numel() + (1 if many else -100)
    x_ND = torch.randn(rows, 64, generator=generator)
    expected = x_ND.double() @ weight.double().T + (0 if bias is None else bias.double())
    product = Product(weight, bias, placeless=placeless)
    found = product(x_ND, torch.empty(rows, 96))
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    assert bool(product.copies) == (placeless or (many and cpu_name != "Intel Xeon"))
    with torch.no_grad():
        weight.mul_(2)
    product.renew()
    twice = product(x_ND, torch.empty(rows, 96)).double()
    offset = 0 if bias is None else bias.double()
    torch.testing.assert_close(twice - offset, 2 * (expected - offset), atol=1e-4, rtol=1e-4)
    if bias is None:
        target = torch.ones(rows, 96)
        product.add_to(target, x_ND)
        torch.testing.assert_close(target.double(), 2 * expected + 1, atol=1e-4, rtol=1e-4)


def test_mkl_is_taken_only_where_torch_has_it_and_knows_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intel = {"cpu_name": "Intel Xeon"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: intel, raising=False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert mkl_runs_on_intel()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not mkl_runs_on_intel()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    # As in a torch that is too old to tell.
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not mkl_runs_on_intel()


@pytest.mark.gpu
def test_replayed_graphs_give_the_logits_of_the_model() -> None:
    """CPU twin: ``test_rows_at_different_places_see_their_own_past_only[ModelForward]``."""
    model = model_of(SHAPES["grouped"]).to("cuda")
    graphed, tokens_NT = GraphedForward(model, cache_of(model, "cuda")), tokens_of(4, 15).cuda()
    with torch.inference_mode():
        expected = model.logits(model(tokens_NT))[:, PROMPT:]
        found = decode(graphed, tokens_NT, ((4, 16),))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
