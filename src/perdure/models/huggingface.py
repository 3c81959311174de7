"""Hugging Face checkpoints of Llama, Qwen2 and Qwen3: read and write ``config.json`` + safetensors.

What this model code does not compute (scaled rotary embedding, sliding windows, other activations)
is refused by name, never approximated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from perdure.core.errors import ConfigError, DamagedError
from perdure.core.storage_api import Storage
from perdure.models.digest import weights_of
from perdure.models.transformer import ModelConfig, Transformer

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``model_type`` → architecture."""

_INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS_FILE = "model.safetensors"


_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class _Piece:
    """``rows`` first rows of one of our parameters under its Hugging Face name."""

    name: str
    rows: int


def load_pretrained(path: str | Path, *, max_positions: int | None = None) -> Transformer:
    """Read a checkpoint directory into a float32 :class:`Transformer` on the CPU.

    Args:
        path: Directory with ``config.json`` and ``model.safetensors``, or shards and their index.
        max_positions: Longest sequence to prepare for; default: what the checkpoint allows.

    Raises:
        ConfigError: Not such a directory, or a feature this model code does not compute.
        DamagedError: A file is unreadable, or tensors are missing, left over or of wrong shape.
    """
    directory = Path(path)
    config = read_config(directory)
    if max_positions is not None:
        config = config.model_copy(
            update={"max_positions": min(max_positions, config.max_positions)}
        )
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to_empty(device="cpu")
    _fill(model, _read_tensors(directory), where=str(directory))
    return model


def copy_pretrained(path: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights of a checkpoint directory into a model of the same shape.

    Args:
        path: As for :func:`load_pretrained`, which says what is raised.
        weights: Name → parameter, as :func:`perdure.models.weights_of` gives them; written to.
    """
    found = weights_of(load_pretrained(path))
    assert found.keys() == weights.keys(), "the shapes were not compared"
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(found[name])


def read_config(path: str | Path) -> ModelConfig:
    """The shape that a checkpoint directory's ``config.json`` describes.

    Raises:
        ConfigError: There is none, or it has a feature this model code does not compute.
        DamagedError: It is unreadable.
    """
    file = Path(path) / "config.json"
    return config_from_huggingface(_read_json(file), where=str(file))


def save_pretrained(model: Transformer, storage: Storage, directory: str) -> None:
    """Write ``model.safetensors``, then ``config.json``, durably, below the storage's root."""
    tensors = {}
    for name, tensor in weights_of(model).items():
        start = 0
        for piece in _pieces(name, model.config):
            tensors[piece.name] = tensor[start : start + piece.rows].contiguous()
            start += piece.rows
    storage.make_dirs(directory)
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    storage.write_atomic(f"{directory}/{_WEIGHTS_FILE}", data)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    written = json.dumps(config_to_huggingface(model.config, dtype=dtype), indent=2)
    storage.write_atomic(f"{directory}/config.json", written.encode() + b"\n")


def config_from_huggingface(given: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Translate ``config.json``.

    Raises:
        ConfigError: Another architecture, or a feature this model code does not compute.
    """
    family = given.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"model_type {family!r} is not supported",
            where=where,
            rule=f"supported are {', '.join(FAMILIES)}",
            way_out="choose a checkpoint of one of these families",
        )
    for feature, used in _unsupported(given, family):
        if used:
            raise ConfigError(
                f"the checkpoint uses {feature}",
                where=where,
                rule="this model code does not compute it and never approximates",
                way_out="choose a checkpoint without it",
            )
    try:
        return _translate(given, family)
    except KeyError as error:
        raise ConfigError(f"the field {error} is missing", where=where) from error
    except ValueError as error:
        raise ConfigError(f"the model cannot be built: {error}", where=where) from error


def _translate(given: Mapping[str, Any], family: str) -> ModelConfig:
    optional = {
        "kv_heads": given.get("num_key_value_heads"),
        "head_dim": given.get("head_dim") or (128 if family == "qwen3" else None),
        "rope_theta": _rope(given).get("rope_theta", given.get("rope_theta")),
    }
    return ModelConfig.model_validate(
        {
            "vocab_size": given["vocab_size"],
            "hidden_size": given["hidden_size"],
            "layers": given["num_hidden_layers"],
            "heads": given["num_attention_heads"],
            "intermediate_size": given["intermediate_size"],
            "rms_norm_eps": given.get("rms_norm_eps", 1e-6),
            "tie_embeddings": given.get("tie_word_embeddings", False),
            "qkv_bias": family == "qwen2",
            "qk_norm": family == "qwen3",
            "max_positions": given["max_position_embeddings"],
            **{name: value for name, value in optional.items() if value is not None},
        }
    )


def _rope(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings: ``rope_parameters`` in newer files, ``rope_scaling`` in older ones."""
    return given.get("rope_parameters") or given.get("rope_scaling") or {}


def _unsupported(given: Mapping[str, Any], family: str) -> Iterator[tuple[str, bool]]:
    rope = _rope(given)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    factor = rope.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    activation = given.get("hidden_act", "silu")
    layers = given.get("layer_types") or ()
    yield f"rotary scaling {rope_type!r}", rope_type != "default"
    yield f"partial rotary embedding ({factor})", factor != 1.0
    yield "a sliding window", bool(given.get("use_sliding_window"))
    yield "a sliding window", any(kind != "full_attention" for kind in layers)
    yield f"the activation {activation!r}", activation not in ("silu", "swish")
    yield "attention_bias", bool(given.get("attention_bias")) and family != "qwen2"
    yield "mlp_bias", bool(given.get("mlp_bias"))
    yield "quantized weights", given.get("quantization_config") is not None


def config_to_huggingface(config: ModelConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The ``config.json`` that describes this model.

    Raises:
        ConfigError: No supported family has both q/k/v biases and q/k norms.
    """
    if config.qkv_bias and config.qk_norm:
        raise ConfigError(
            "no Hugging Face family has both qkv_bias and qk_norm",
            where="model",
            rule=f"exported are {', '.join(FAMILIES)}",
            way_out="train a model with one of the two",
        )
    family = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"
    if family == "qwen2" and config.head_dim * config.heads != config.hidden_size:
        raise ConfigError(
            f"Qwen2 derives head_dim, so {config.head_dim} cannot be exported",
            where="model.head_dim",
            rule="head_dim must be hidden_size / heads with qkv_bias",
            way_out="train a model without qkv_bias",
        )
    return {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "max_position_embeddings": config.max_positions,
        "torch_dtype": dtype,
    }


def _pieces(name: str, config: ModelConfig) -> list[_Piece]:
    """The Hugging Face tensors that, stacked, make up one of our parameters."""
    outer = {
        "embed.weight": ("model.embed_tokens.weight", config.vocab_size),
        "lm_head.weight": ("lm_head.weight", config.vocab_size),
        "norm.weight": ("model.norm.weight", config.hidden_size),
    }
    if name in outer:
        return [_Piece(*outer[name])]
    _, layer, inner = name.split(".", 2)
    module, kind = inner.rsplit(".", 1)
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = {
        "attention_norm": [("input_layernorm", config.hidden_size)],
        "attention.qkv": [
            ("self_attn.q_proj", query),
            ("self_attn.k_proj", key_value),
            ("self_attn.v_proj", key_value),
        ],
        "attention.out": [("self_attn.o_proj", config.hidden_size)],
        "attention.q_norm": [("self_attn.q_norm", config.head_dim)],
        "attention.k_norm": [("self_attn.k_norm", config.head_dim)],
        "mlp_norm": [("post_attention_layernorm", config.hidden_size)],
        "mlp.gate_up": [
            ("mlp.gate_proj", config.intermediate_size),
            ("mlp.up_proj", config.intermediate_size),
        ],
        "mlp.down": [("mlp.down_proj", config.hidden_size)],
    }[module]
    return [_Piece(f"model.layers.{layer}.{part}.{kind}", rows) for part, rows in parts]


def _fill(model: Transformer, tensors: dict[str, Tensor], *, where: str) -> None:
    """Copy every tensor to its place; each must be used exactly once."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            start = 0
            for piece in _pieces(name, model.config):
                target = parameter[start : start + piece.rows]
                tensor = tensors.pop(piece.name, None)
                if tensor is None or tensor.shape != target.shape:
                    found = "missing" if tensor is None else f"{tuple(tensor.shape)}"
                    raise DamagedError(
                        f"tensor {piece.name} is {found}",
                        where=where,
                        rule=f"config.json asks for {tuple(target.shape)}",
                        way_out="fetch the checkpoint again",
                    )
                target.copy_(tensor)
                start += piece.rows
    # Tied checkpoints may repeat the embedding; old ones carry rotary frequencies.
    ignored = {"lm_head.weight"} if model.config.tie_embeddings else set()
    left = [name for name in tensors if name not in ignored and "rotary_emb" not in name]
    if left:
        raise DamagedError(
            f"{len(left)} tensors have no place in the model, first {min(left)}",
            where=where,
            rule="every tensor must be used exactly once",
            way_out="check that config.json belongs to these weights",
        )


def _read_json(path: Path) -> dict[str, Any]:
    def parse() -> dict[str, Any]:
        return dict(json.loads(path.read_text(encoding="utf-8")))

    return _readable(path, parse)


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / _INDEX_FILE
    if not index.exists():
        return _read_file(directory / _WEIGHTS_FILE)
    shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors.update(_read_file(directory / shard))
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    return _readable(path, lambda: safetensors.torch.load_file(path))


def _readable(path: Path, read: Callable[[], _Read]) -> _Read:
    try:
        return read()
    except FileNotFoundError as error:
        raise ConfigError(
            "the file does not exist",
            where=str(path),
            rule="a checkpoint has config.json and model.safetensors, or shards and their index",
            way_out="give the path of a complete Hugging Face directory",
        ) from error
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise DamagedError(
            f"the file cannot be read: {error}",
            where=str(path),
            way_out="fetch the checkpoint again",
        ) from error
