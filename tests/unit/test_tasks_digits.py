from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from perdure.core.errors import ConfigError
from perdure.tasks.config import TaskConfig, make_task
from perdure.tasks.generated import GeneratedTask


def pairs(task: object, count: int = 300) -> list[tuple[str, str]]:
    assert isinstance(task, GeneratedTask)
    decode = task.tokenizer.decode
    return [
        (decode(d.prompt_ids), decode(d.response_ids))
        for d in map(task.demonstration, range(count))
    ]


def make(name: str, **sections: object) -> GeneratedTask:
    task = make_task(TaskConfig.model_validate({"name": name, **sections}), 11)
    assert isinstance(task, GeneratedTask)
    return task


def test_sort_digits_sorts_and_keeps_repeated_digits():
    task = make("sort_digits")
    for prompt, response in pairs(task):
        assert prompt[-1] == "="
        assert response == "".join(sorted(prompt[:-1]))
    assert task.prompt(3).answer == "".join(
        sorted(task.tokenizer.decode(task.prompt(3).prompt_ids)[:-1])
    )
    assert task.max_prompt_tokens == task.max_answer_tokens == 13


def test_lengths_are_uniform_between_the_bounds():
    task = make("sort_digits", digits={"min_digits": 3, "max_digits": 12})
    lengths = Counter(len(prompt) - 1 for prompt, _ in pairs(task, 2_000))
    assert set(lengths) == set(range(3, 13))
    assert all(140 <= count <= 260 for count in lengths.values())


def test_reverse_digits_reverses():
    assert all(r == p[-2::-1] for p, r in pairs(make("reverse_digits")))


def test_add_numbers_adds():
    task = make("add_numbers", add={"min_digits": 1, "max_digits": 3})
    for prompt, response in pairs(task):
        left, right = prompt[:-1].split("+")
        assert int(left) + int(right) == int(response)
        assert str(int(left)) == left


def test_add_numbers_reversed_is_padded_to_one_width():
    for prompt, response in pairs(make("add_numbers", add={"reversed_padded": True})):
        left, right = prompt[:-1].split("+")
        assert (len(left), len(right), len(response)) == (2, 2, 3)
        assert int(left[::-1]) + int(right[::-1]) == int(response[::-1])


def test_a_wrong_order_is_wrong():
    task = make("sort_digits")
    prompt = task.prompt(0)
    right = (*task.tokenizer.encode(prompt.answer), task.tokenizer.eos_id)
    wrong = (*task.tokenizer.encode(prompt.answer[::-1]), task.tokenizer.eos_id)
    assert task.verify(prompt, right).reward == 1.0
    assert task.verify(prompt, wrong).reward == 0.0


def test_a_space_too_small_for_the_split_says_so():
    task = make("add_numbers", add={"min_digits": 1, "max_digits": 1})
    with pytest.raises(ConfigError, match=r"only \d+ different held-out"):
        task.held_out(50)


@pytest.mark.parametrize("section", ["digits", "add"])
def test_bounds_in_the_wrong_order_are_refused(section: str):
    name = {"digits": "sort_digits", "add": "add_numbers"}[section]
    with pytest.raises(ValidationError, match="must not exceed max_digits"):
        TaskConfig.model_validate({"name": name, section: {"min_digits": 9, "max_digits": 4}})


def test_an_unknown_task_gets_the_nearest_name():
    with pytest.raises(ValidationError, match="did you mean 'sort_digits'"):
        TaskConfig(name="sort_digit")
    with pytest.raises(ValidationError, match="use one of: add_numbers, calculator, jsonl"):
        TaskConfig(name="zzzz")


def test_options_of_another_task_are_refused():
    with pytest.raises(ValidationError, match="section 'jsonl' does not belong to task"):
        TaskConfig.model_validate({"name": "sort_digits", "jsonl": {"path": "x"}})
    with pytest.raises(ValidationError, match="section 'digits' does not belong to task"):
        TaskConfig.model_validate({"name": "add_numbers", "digits": {"max_digits": 5}})
    with pytest.raises(ValidationError, match=r"needs task\.jsonl\.path"):
        TaskConfig(name="jsonl")
    with pytest.raises(ValidationError, match=r"needs task\.reasoning_gym\.dataset"):
        TaskConfig(name="reasoning_gym")


def test_a_resolved_config_is_accepted_again():
    config = TaskConfig.model_validate({"name": "add_numbers", "add": {"max_digits": 3}})
    assert TaskConfig.model_validate(config.model_dump()) == config


def test_the_digest_covers_every_option():
    digests = {
        make("sort_digits").dataset_digest,
        make("reverse_digits").dataset_digest,
        make("sort_digits", digits={"max_digits": 11}).dataset_digest,
        make("sort_digits", digits={"min_digits": 2}).dataset_digest,
        make("add_numbers").dataset_digest,
        make("add_numbers", add={"reversed_padded": True}).dataset_digest,
    }
    assert len(digests) == 6


def test_streams_are_the_published_ones():
    """Other data for the same seed would break every run on disk; raise the stream format then."""
    task = make("sort_digits")
    assert [task.tokenizer.decode(task.prompt(i).prompt_ids) for i in range(3)] == STREAM
    assert [task.tokenizer.decode(p.prompt_ids) for p in task.held_out(3)] == HELD_OUT


STREAM = ["691=", "86500=", "71439895883="]
HELD_OUT = ["48138345005=", "728748=", "8318774="]
