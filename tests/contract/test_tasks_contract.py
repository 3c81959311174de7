"""Every task keeps the promises of ``perdure.tasks.api``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import ConfigError
from perdure.tasks.api import Task, require_same_data
from perdure.tasks.config import SECTIONS, TaskConfig, make_task
from perdure.tasks.samples import min_max_jsonl

pytest.importorskip("reasoning_gym")

CASES: dict[str, dict[str, object]] = {
    "sort_digits": {},
    "sort_digits tiny": {"digits": {"min_digits": 1, "max_digits": 3}},
    "reverse_digits": {},
    "add_numbers": {"add": {"min_digits": 1, "max_digits": 3}},
    "add_numbers reversed": {"add": {"max_digits": 2, "reversed_padded": True}},
    "calculator": {"calculator": {"min_digits": 1, "max_digits": 2}},
    "jsonl": {"jsonl": {"path": "FILE"}},
    "jsonl bytes": {"jsonl": {"path": "FILE", "tokenizer": "bytes", "held_out_fraction": 0.3}},
    "reasoning_gym": {
        "reasoning_gym": {
            "dataset": "basic_arithmetic",
            "config": {"max_terms": 2, "max_digits": 1, "operators": ["+", "-"]},
        }
    },
    "reasoning_gym words": {
        "reasoning_gym": {"dataset": "spell_backward", "config": {"max_word_len": 3}}
    },
}
HELD_OUT = 24
INDICES = [0, 1, 2, 7, 63, 999, 123_456_789]


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "min_max.jsonl"
    path.write_text(min_max_jsonl(seed=3, count=300))
    return path


def name_of(case: str) -> str:
    return case.partition(" ")[0]


def build(case: str, data_file: Path, *, seed: int = 5) -> Task:
    sections = {
        name: {key: str(data_file) if value == "FILE" else value for key, value in section.items()}
        for name, section in CASES[case].items()
        if isinstance(section, dict)
    }
    return make_task(TaskConfig.model_validate({"name": name_of(case), **sections}), seed)


@pytest.fixture(params=CASES)
def task(request: pytest.FixtureRequest, data_file: Path) -> Task:
    return build(request.param, data_file)


def test_every_task_is_in_the_suite():
    assert {name_of(case) for case in CASES} == set(SECTIONS)


@pytest.mark.parametrize("case", CASES)
def test_a_position_alone_resumes_every_stream(case: str, data_file: Path):
    first, second = build(case, data_file), build(case, data_file)
    forward = [(first.prompt(i), first.demonstration(i)) for i in INDICES]
    backward = [(second.prompt(i), second.demonstration(i)) for i in reversed(INDICES)]
    assert forward == backward[::-1]
    assert [prompt.data_index for prompt, _ in forward] == INDICES
    assert first.held_out(HELD_OUT) == second.held_out(HELD_OUT)
    assert first.dataset_digest == second.dataset_digest


@pytest.mark.parametrize("case", CASES)
def test_the_seed_changes_training_but_not_evaluation(case: str, data_file: Path):
    first, second = build(case, data_file), build(case, data_file, seed=6)
    assert [first.prompt(i).prompt_ids for i in range(20)] != [
        second.prompt(i).prompt_ids for i in range(20)
    ]
    assert first.held_out(HELD_OUT) == second.held_out(HELD_OUT)
    assert first.dataset_digest != second.dataset_digest
    with pytest.raises(ConfigError, match="data has changed"):
        require_same_data(first, second.dataset_digest)
    require_same_data(first, first.dataset_digest)


def test_held_out_prompts_are_different_and_never_trained(task: Task):
    held_out = task.held_out(HELD_OUT)
    texts = {prompt.prompt_ids for prompt in held_out}
    assert len(texts) == len(held_out) == HELD_OUT
    assert [prompt.data_index for prompt in held_out] == list(range(HELD_OUT))
    trained = {task.prompt(i).prompt_ids for i in range(600)}
    shown = {task.demonstration(i).prompt_ids for i in range(600)}
    assert not texts & (trained | shown)


def test_a_shorter_held_out_set_is_a_prefix(task: Task):
    assert task.held_out(HELD_OUT)[:5] == task.held_out(5)
    assert task.held_out(0) == []


def test_more_held_out_prompts_than_there_are_is_refused(data_file: Path):
    for case in ("jsonl", "sort_digits tiny"):
        with pytest.raises(ConfigError, match="held-out prompts"):
            build(case, data_file).held_out(5_000)


def test_lengths_stay_below_the_bounds(task: Task):
    for index in range(200):
        prompt_ids, response_ids, loss_mask = task.demonstration(index)
        assert len(loss_mask) == len(response_ids)
        assert set(loss_mask) <= {0, 1}
        assert 0 < len(prompt_ids) <= task.max_prompt_tokens
        assert 1 < len(response_ids) <= task.max_answer_tokens
        assert response_ids[-1] == task.tokenizer.eos_id
        assert max(*prompt_ids, *response_ids) < task.tokenizer.vocab_size
        assert 0 < len(task.prompt(index).prompt_ids) <= task.max_prompt_tokens


def test_the_right_answer_is_right_and_a_cut_one_wrong(task: Task):
    answers = {task.demonstration(i).prompt_ids: task.demonstration(i) for i in range(600)}
    judged = 0
    for index in range(600):
        prompt = task.prompt(index)
        known = answers.get(prompt.prompt_ids)
        if known is None:
            continue
        judged += 1
        verdict = task.verify(prompt, known.response_ids)
        assert verdict.reward == 1.0
        assert verdict.parts["correct"] == 1.0
        assert task.verify(prompt, known.response_ids[:-1]).parts["correct"] == 0.0
    if task.name not in ("sort_digits", "reverse_digits"):
        assert judged


def test_no_response_makes_the_verifier_raise(task: Task):
    random = np.random.default_rng(0)
    eos = task.tokenizer.eos_id
    responses = [(), (eos,), (eos, eos), (0, eos), (-1, eos), (10_000, eos), (2,)]
    responses += [
        (*random.integers(0, task.tokenizer.vocab_size, size=length).tolist(), eos)
        for length in random.integers(0, 30, size=100).tolist()
    ]
    for index, response in enumerate(responses):
        verdict = task.verify(task.prompt(index), response)
        assert verdict.parts["correct"] in (0.0, 1.0)
        assert 0.0 <= verdict.reward <= 1.0
