import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from perdure.core.errors import ConfigError, DamagedError
from perdure.models import ModelConfig, Transformer, digest_weights, init_weights, weights_of
from perdure.models.huggingface import config_from_huggingface, load_pretrained, save_pretrained
from perdure.storage import MemoryStorage

SHAPE: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"head_dim": 8}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 12}),
}
SUPPORTED = SHAPE | {"model_type": "llama"}


def reference(family: str, *, tied: bool) -> Any:
    config, model, extra = FAMILIES[family]
    torch.manual_seed(3)
    built = model(config(**SHAPE, **extra, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return built


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randint(
        0, SHAPE["vocab_size"], (3, 20), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_transformers(
    family: str, tied: bool, rows: torch.Tensor, tmp_path: Path
) -> None:
    theirs = reference(family, tied=tied)
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    assert ours.config.qkv_bias == (family == "qwen2")
    assert ours.config.qk_norm == (family == "qwen3")
    with torch.no_grad():
        expected = theirs(rows).logits.log_softmax(-1)
        found = ours.logits(ours(rows)).log_softmax(-1)
    assert (expected - found).abs().max() < 1e-4


def test_shards_and_their_index(rows: torch.Tensor, tmp_path: Path) -> None:
    theirs = reference("qwen3", tied=False)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (load_pretrained(tmp_path / name) for name in ("whole", "shards"))
    assert digest_weights(weights_of(whole)) == digest_weights(weights_of(shards))


@pytest.mark.parametrize("changed", [{}, {"qkv_bias": True}, {"qk_norm": True, "head_dim": 10}])
def test_transformers_reads_what_we_write(
    changed: dict[str, Any], rows: torch.Tensor, tmp_path: Path
) -> None:
    config = config_from_huggingface(SUPPORTED, where="test").model_copy(update=changed)
    ours = Transformer(config)
    init_weights(ours, 1)
    storage = MemoryStorage()
    save_pretrained(ours, storage, "export")
    for name in storage.list("export"):
        (tmp_path / name).write_bytes(storage.read(f"export/{name}"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(rows).logits.log_softmax(-1)
        found = ours.logits(ours(rows)).log_softmax(-1)
    assert (expected - found).abs().max() < 1e-4
    again = load_pretrained(tmp_path)
    assert again.config == config
    assert digest_weights(weights_of(again)) == digest_weights(weights_of(ours))


def test_both_biases_and_norms_cannot_be_exported() -> None:
    config = config_from_huggingface(SUPPORTED, where="test")
    odd = Transformer(config.model_copy(update={"qkv_bias": True, "qk_norm": True}))
    with pytest.raises(ConfigError, match="both qkv_bias and qk_norm"):
        save_pretrained(odd, MemoryStorage(), "export")
    wide = Transformer(config.model_copy(update={"qkv_bias": True, "head_dim": 12}))
    with pytest.raises(ConfigError, match="head_dim"):
        save_pretrained(wide, MemoryStorage(), "export")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"use_sliding_window": True}, "a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_key_value_heads": 3}, "kv_heads"),
    ],
)
def test_what_is_not_computed_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_from_huggingface(SUPPORTED | changed, where="config.json")


def test_a_missing_field_is_named() -> None:
    without = {key: value for key, value in SUPPORTED.items() if key != "hidden_size"}
    with pytest.raises(ConfigError, match="hidden_size"):
        config_from_huggingface(without, where="config.json")


def test_rotary_base_from_old_and_new_files() -> None:
    old = config_from_huggingface(SUPPORTED | {"rope_theta": 5e5}, where="test")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    new = config_from_huggingface(SUPPORTED | {"rope_parameters": rope}, where="test")
    assert old.rope_theta == new.rope_theta == 5e5


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    reference("llama", tied=True).save_pretrained(tmp_path)
    return tmp_path


def test_positions_can_be_limited(exported: Path) -> None:
    assert load_pretrained(exported, max_positions=16).config.max_positions == 16
    assert load_pretrained(exported, max_positions=1000).config.max_positions == 64


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_absent_files_are_named(exported: Path, name: str) -> None:
    (exported / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: the file does not exist"):
        load_pretrained(exported)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_files_are_not_absent(exported: Path, name: str) -> None:
    data = (exported / name).read_bytes()
    (exported / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedError, match=name):
        load_pretrained(exported)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update(surplus=torch.zeros(2)), "first surplus"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight is \(3,\)",
        ),
    ],
)
def test_tensors_must_fit_exactly(exported: Path, edit: Any, said: str) -> None:
    path = exported / "model.safetensors"
    tensors = safetensors.torch.load(path.read_bytes())
    edit(tensors)
    path.write_bytes(safetensors.torch.save(tensors))
    with pytest.raises(DamagedError, match=said):
        load_pretrained(exported)


def test_half_precision_files_are_read_as_float32(exported: Path) -> None:
    path = exported / "model.safetensors"
    halves = {k: v.bfloat16() for k, v in safetensors.torch.load(path.read_bytes()).items()}
    path.write_bytes(safetensors.torch.save(halves))
    model = load_pretrained(exported)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.embed.weight, halves["model.embed_tokens.weight"].float())


def test_config_is_plain_json(exported: Path) -> None:
    given = json.loads((exported / "config.json").read_text())
    assert isinstance(config_from_huggingface(given, where="test"), ModelConfig)
