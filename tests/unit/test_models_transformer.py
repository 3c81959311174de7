import pytest
import torch
from pydantic import ValidationError
from torch import nn

from perdure.models import (
    ModelConfig,
    Transformer,
    ValueModel,
    digest_weights,
    init_weights,
    parameter_count,
    weights_of,
)
from perdure.models.digest import as_array

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate_size=24,
    max_positions=32,
)


def model_of(config: ModelConfig = CONFIG, seed: int = 1) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed)
    return model


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab_size, (rows, length), generator=generator)


def test_heads_follow_from_the_other_fields() -> None:
    config = ModelConfig(vocab_size=5, hidden_size=24, layers=1, heads=3, intermediate_size=8)
    assert (config.kv_heads, config.head_dim) == (3, 8)


@pytest.mark.parametrize(
    "changed", [{"kv_heads": 3}, {"head_dim": 5}, {"heads": 0}, {"layers": 0}, {"unknown": 1}]
)
def test_impossible_shapes_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        ModelConfig.model_validate(CONFIG.model_dump() | changed)


@pytest.mark.parametrize(
    "changed", [{}, {"tie_embeddings": False}, {"qkv_bias": True}, {"qk_norm": True, "layers": 3}]
)
def test_weights_are_counted_without_a_model(changed: dict[str, int | bool]) -> None:
    config = CONFIG.model_copy(update=changed)
    assert parameter_count(config) == sum(p.numel() for p in Transformer(config).parameters())


def test_same_seed_same_bits_and_another_seed_others() -> None:
    digests = [digest_weights(weights_of(model_of(seed=seed))) for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_initialization_uses_no_global_stream() -> None:
    model = Transformer(CONFIG)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    init_weights(model, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_initial_scales() -> None:
    wide = CONFIG.model_copy(update={"hidden_size": 64, "head_dim": 16, "intermediate_size": 96})
    weights = weights_of(model_of(wide))
    assert weights["embed.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["blocks.0.attention.qkv.weight"].std().item() == pytest.approx(1 / 8, rel=0.1)
    assert weights["blocks.0.attention.out.weight"].std().item() == pytest.approx(1 / 16, rel=0.1)
    assert bool((weights["blocks.1.mlp_norm.weight"] == 1).all())


def test_padding_on_the_right_does_not_reach_real_positions() -> None:
    model = model_of()
    short = tokens(1, 5)
    padded = torch.cat((short, tokens(1, 7, seed=9)), dim=1)
    torch.testing.assert_close(model(padded)[:, :5], model(short), atol=1e-6, rtol=1e-5)


def test_a_later_token_changes_only_what_follows() -> None:
    model = model_of()
    first = tokens(1, 8)
    second = first.clone()
    second[0, 4] = (second[0, 4] + 1) % CONFIG.vocab_size
    same = (model(first) == model(second)).all(-1)[0]
    assert same[:4].all()
    assert not same[4:].any()


def test_attention_depends_on_distance_not_on_absolute_position() -> None:
    model = model_of()
    row = tokens(1, 6)
    shifted = model(row, positions=torch.arange(6) + 11)
    torch.testing.assert_close(model(row), shifted, atol=1e-5, rtol=1e-4)
    stretched = model(row, positions=torch.arange(6) * 2)
    assert not torch.allclose(model(row), stretched, atol=1e-3)


def test_positions_may_differ_by_row() -> None:
    model = model_of()
    rows = tokens(2, 4)
    positions = torch.stack((torch.arange(4), torch.arange(4) * 3))
    both = model(rows, positions=positions)
    alone = model(rows[1:], positions=positions[1])
    torch.testing.assert_close(both[1:], alone, atol=1e-6, rtol=1e-5)


def test_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens exceed max_positions 32"):
        model_of()(tokens(1, 33))


def test_trains_after_a_first_call_in_inference_mode() -> None:
    model = model_of()
    with torch.inference_mode():
        model(tokens(2, 4))
    model.logits(model(tokens(2, 4))).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tied_weights_appear_once_and_serve_both_ends() -> None:
    tied, untied = model_of(), model_of(CONFIG.model_copy(update={"tie_embeddings": False}))
    assert set(weights_of(untied)) - set(weights_of(tied)) == {"lm_head.weight"}
    hidden = torch.eye(CONFIG.hidden_size)
    assert torch.equal(tied.logits(hidden), tied.embed.weight.T)
    assert isinstance(untied.lm_head, nn.Linear)
    assert torch.equal(untied.logits(hidden), untied.lm_head.weight.T)


def test_value_model_starts_at_zero_and_sees_the_past_only() -> None:
    model = ValueModel(CONFIG)
    init_weights(model, 1)
    rows = tokens(3, 6)
    assert not model(rows).any()
    with torch.no_grad():
        model.head.weight.fill_(0.1)
    changed = rows.clone()
    changed[:, 3] = (changed[:, 3] + 1) % CONFIG.vocab_size
    same = model(rows) == model(changed)
    assert model(rows).shape == (3, 6)
    assert same[:, :3].all()
    assert not same[:, 3:].any()


def test_value_trunk_and_policy_share_names() -> None:
    trunk = {name.removeprefix("trunk.") for name in weights_of(ValueModel(CONFIG))}
    assert trunk - {"head.weight", "head.bias"} == set(weights_of(Transformer(CONFIG)))


def test_digest_tells_names_dtypes_and_bits_apart() -> None:
    tensor = torch.ones(2, 3)
    digests = {
        digest_weights({"a": tensor}),
        digest_weights({"b": tensor}),
        digest_weights({"a": tensor.T}),
        digest_weights({"a": tensor.bfloat16()}),
        digest_weights({"a": tensor + torch.finfo(torch.float32).eps}),
    }
    assert len(digests) == 5
    assert as_array(tensor.bfloat16()).tobytes() == b"\x80\x3f" * 6
