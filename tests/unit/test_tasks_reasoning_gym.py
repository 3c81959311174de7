from __future__ import annotations

import importlib
import json

import pytest

from perdure.core.errors import ConfigError, TrainingError
from perdure.tasks.api import Prompt
from perdure.tasks.generated import GeneratedTask
from perdure.tasks.reasoning_gym import (
    RUNS_ANSWERS,
    ReasoningGymOptions,
    reasoning_gym_task,
)

factory = pytest.importorskip("reasoning_gym.factory")


def make(dataset: str, seed: int = 2, **options: object) -> GeneratedTask:
    values = {"dataset": dataset, **options}
    return reasoning_gym_task(ReasoningGymOptions.model_validate(values), seed)


def verdict(task: GeneratedTask, prompt: Prompt, text: str) -> dict[str, float]:
    result = task.verify(prompt, (*task.tokenizer.encode(text), task.tokenizer.eos_id))
    return {"reward": result.reward, **result.parts}


def test_the_package_judges_with_its_own_score():
    task = make("spell_backward")
    prompt = task.prompt(0)
    answer = json.loads(prompt.answer)["answer"]
    assert verdict(task, prompt, answer) == {"reward": 1.0, "correct": 1.0, "verifier_failed": 0.0}
    partly = verdict(task, prompt, answer[0] + "#" * (len(answer) - 1))
    assert 0.0 < partly["reward"] < 1.0
    assert partly["correct"] == 0.0


def test_a_response_that_the_verifier_cannot_read_is_a_counted_zero():
    task = make("coin_flip", max_prompt_tokens=4000)
    prompt = task.prompt(0)
    answer = json.loads(prompt.answer)["answer"]
    assert verdict(task, prompt, answer)["correct"] == 1.0
    assert verdict(task, prompt, "1e999") == {
        "reward": 0.0,
        "correct": 0.0,
        "verifier_failed": 1.0,
    }


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(RuntimeError, TrainingError), (OSError, OSError), (MemoryError, MemoryError)],
)
def test_a_verifier_that_does_not_work_is_never_a_zero(
    monkeypatch: pytest.MonkeyPatch, raised: type[Exception], expected: type[Exception]
):
    task = make("spell_backward")
    prompt = task.prompt(0)

    def score_answer(*_: object) -> float:
        raise raised("out of order")

    monkeypatch.setattr(factory.DATASETS["spell_backward"][0], "score_answer", score_answer)
    with pytest.raises(expected, match="out of order"):
        verdict(task, prompt, "x")


def test_trouble_with_the_machine_is_never_a_zero(monkeypatch: pytest.MonkeyPatch):
    """Although the verifier works again a moment later."""
    task = make("spell_backward")
    prompt = task.prompt(0)
    dataset_class = factory.DATASETS["spell_backward"][0]
    score, calls = dataset_class.score_answer, list[object]()

    def score_answer(*arguments: object) -> float:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError("too many open files")
        return score(*arguments)

    monkeypatch.setattr(dataset_class, "score_answer", score_answer)
    with pytest.raises(OSError, match="too many open files"):
        verdict(task, prompt, "x")


def test_prompts_beyond_the_limits_are_passed_over():
    free = make("spell_backward")
    tight = make("spell_backward", max_prompt_tokens=free.max_prompt_tokens, max_answer_tokens=5)
    answers = [json.loads(tight.prompt(i).answer)["answer"] for i in range(50)]
    assert max(map(len, answers)) == 4


def test_limits_that_nothing_meets_are_refused():
    with pytest.raises(ConfigError, match="no training prompt"):
        make("spell_backward", max_prompt_tokens=3).prompt(0)


def test_an_unknown_data_set_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'spell_backward'"):
        make("spell_backwards")


def test_an_unknown_option_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"max_word_length.*did you mean 'max_word_len'"):
        make("spell_backward", config={"max_word_length": 4})
    with pytest.raises(ConfigError, match="seed"):
        make("spell_backward", config={"seed": 4})


def test_an_option_out_of_bounds_says_why():
    with pytest.raises(ConfigError, match="max_word_len must be >= min_word_len"):
        make("spell_backward", config={"min_word_len": 5, "max_word_len": 4})


@pytest.mark.parametrize("dataset", sorted(RUNS_ANSWERS))
def test_verifiers_that_run_answers_must_be_allowed(dataset: str):
    assert dataset in factory.DATASETS
    with pytest.raises(ConfigError, match="allow_running_answers=true"):
        make(dataset)


def test_a_data_set_with_numbered_items_only_is_refused():
    with pytest.raises(ConfigError, match="no item of any number"):
        make("list_functions")


def test_items_that_depend_on_reading_order_are_refused(monkeypatch: pytest.MonkeyPatch):
    dataset_class = factory.DATASETS["spell_backward"][0]
    draw = dataset_class.__getitem__

    def stateful(self: object, number: int) -> dict[str, object]:
        reads = getattr(self, "reads", 0) + 1
        self.__dict__["reads"] = reads
        return {**draw(self, number), "answer": str(reads)}

    monkeypatch.setattr(dataset_class, "__getitem__", stateful)
    with pytest.raises(ConfigError, match="order in which they are read"):
        make("spell_backward")


def test_another_version_of_the_data_is_noticed():
    task = make("spell_backward")
    prompt = task.prompt(0)
    needed = json.loads(prompt.answer)
    changed = Prompt(prompt.prompt_ids, prompt.task, json.dumps({**needed, "answer": "zz"}), 0)
    with pytest.raises(ConfigError, match="another answer"):
        verdict(task, changed, "zz")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r'pip install "perdure\[reasoning-gym\]"'):
        make("spell_backward")
