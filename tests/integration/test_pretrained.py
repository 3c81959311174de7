"""Recipes that begin with a model in Hugging Face format, and what is exported of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
import yaml
from typer.testing import CliRunner

from perdure.cli import main as cli
from perdure.config import load_config
from perdure.core.errors import ConfigError, DamagedError
from perdure.experience import read_experience
from perdure.models import digest_weights, weights_of
from perdure.models.huggingface import load_pretrained
from perdure.storage import PosixStorage
from perdure.tasks.config import make_task
from perdure.trainers import launch
from perdure.trainers.config import RunConfig

RECIPE = Path(__file__).parents[1] / "drills" / "drill_recipe.yaml"


def shape(**changed: Any) -> dict[str, Any]:
    """Of a Llama that fits the recipe below."""
    task = make_task(load_config(RunConfig, RECIPE).task, 7)
    return {
        "vocab_size": task.tokenizer.vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    } | changed


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of shards, as transformers writes it."""
    torch.manual_seed(11)
    directory = tmp_path_factory.mktemp("llama")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape()))
    model.save_pretrained(directory, max_shard_size="4KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def recipe(tmp_path: Path, directory: Path, *, imitate: int = 0, **model: Any) -> RunConfig:
    """The drill recipe for two steps, from that directory, after imitating for some steps."""
    settings = yaml.safe_load(RECIPE.read_text())
    settings["model"] |= {"qk_norm": False, "rms_norm_eps": 1e-5} | model
    settings["model"]["from_pretrained"] = str(directory)
    settings["learner"]["supervised"]["steps"] = imitate
    settings["trainer"]["total_steps"] = 2
    settings["checkpoint"] = {"every_steps": 1, "keep": 5}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return load_config(RunConfig, path)


def test_training_begins_with_these_weights_and_exports_them_byte_for_byte(
    llama: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launch.train(recipe(tmp_path, llama), run)
    first, last = tmp_path / "first", tmp_path / "last"
    call("export", run, first, "--checkpoint", first_of(run))
    assert tensors(first) == tensors(llama)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(llama)
    again = transformers.AutoModelForCausalLM.from_pretrained(first)
    ours = load_pretrained(first)
    rows = torch.randint(0, shape()["vocab_size"], (3, 9))
    with torch.no_grad():
        expected = theirs(rows).logits
        assert torch.equal(again(rows).logits, expected)
        assert (ours.logits(ours(rows)) - expected).abs().max() < 1e-4

    # What was exported begins another run; that one changes it.
    more = tmp_path / "more"
    launch.train(recipe(tmp_path, first, imitate=4), more)
    call("export", more, last)
    assert tensors(last).keys() == tensors(llama).keys()
    assert tensors(last) != tensors(llama)
    shown = json.loads(call("ckpt", "show", run, first_of(run), "--digests", "--json"))
    assert shown["digests"]["policy"] == digest_weights(weights_of(load_pretrained(llama)))


def test_a_run_goes_on_without_the_directory(llama: Path, tmp_path: Path) -> None:
    copy, run = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(llama, copy)
    config = recipe(tmp_path, copy)
    launch.train(config, run)
    shutil.rmtree(copy)
    launch.resume(run)
    with pytest.raises(ConfigError, match="copy"):
        launch.train(config, tmp_path / "another")
    assert not (tmp_path / "another" / "run.json").exists()


def test_other_shapes_are_refused_with_every_field(llama: Path, tmp_path: Path) -> None:
    config = recipe(tmp_path, llama, intermediate_size=64, qkv_bias=True, rms_norm_eps=1e-6)
    with pytest.raises(ConfigError) as caught:
        launch.train(config, tmp_path / "run")
    for said in (
        "model.intermediate_size is 64, and there 32",
        "model.qkv_bias is True, and there False",
        "model.rms_norm_eps is 1e-06, and there 1e-05",
    ):
        assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_is_refused(llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    (copy / "vocabulary.json").write_text('{"pad_token_id": 0, "characters": {"a": 2}}')
    with pytest.raises(ConfigError, match="token ids do not stand for"):
        launch.train(recipe(tmp_path, copy), tmp_path / "run")
    (copy / "vocabulary.json").write_text("{")
    with pytest.raises(DamagedError, match=r"vocabulary\.json"):
        launch.train(recipe(tmp_path, copy), tmp_path / "run")


@pytest.mark.parametrize("change", ["missing", "left over", "of another shape"])
def test_tensors_that_do_not_fit_are_refused_by_name_before_there_is_a_run(
    llama: Path, tmp_path: Path, change: str
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(llama / "config.json", copy)
    found = load_all(llama)
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "missing":
        del found[name]
    elif change == "left over":
        name = "model.layers.1.mlp.up_proj.weight"
        found[name] = torch.zeros(2)
    else:
        found[name] = torch.zeros(3, 3)
    safetensors.torch.save_file(found, copy / "model.safetensors")
    with pytest.raises(DamagedError, match=name):
        launch.train(recipe(tmp_path, copy), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def call(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def first_of(run: Path) -> str:
    return read_experience(PosixStorage(run))[0].checkpoints[0].directory


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found


def tensors(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor as its type, shape and bytes."""
    return {
        name: (str(tensor.dtype), list(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in load_all(directory).items()
    }
