from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.tasks.config import TaskConfig, make_task
from perdure.tasks.partition import is_held_out
from perdure.tasks.tokenizer import ByteTokenizer, CharTokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NAMES = st.sampled_from(["sort_digits", "reverse_digits", "add_numbers"])


@given(TEXT)
def test_tokenizers_are_reversible(text: str):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text
    tokenizer = CharTokenizer("".join(sorted(set(text))) or "x")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=40)
@given(NAMES, st.integers(0, 2**63), st.integers(0, 2**63))
def test_no_seed_and_no_index_trains_a_held_out_prompt(name: str, seed: int, index: int):
    task = make_task(TaskConfig(name=name), seed)
    for ids in (task.prompt(index).prompt_ids, task.demonstration(index).prompt_ids):
        assert not is_held_out(task.tokenizer.decode(ids))
    assert task.prompt(index) == make_task(TaskConfig(name=name), seed).prompt(index)


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), TEXT)
def test_a_larger_held_out_share_contains_the_smaller(first: float, second: float, text: str):
    low, high = sorted((first, second))
    assert is_held_out(text, fraction=low) <= is_held_out(text, fraction=high)


def test_the_held_out_share_is_the_one_asked_for():
    held_out = sum(is_held_out(f"prompt {i}", fraction=0.25) for i in range(20_000))
    assert 4_700 < held_out < 5_300


@settings(max_examples=60)
@given(NAMES, st.lists(st.integers(-3, 400), max_size=20))
def test_the_verifier_judges_anything(name: str, response: list[int]):
    task = make_task(TaskConfig(name=name), 0)
    prompt = task.prompt(0)
    right = [*task.tokenizer.encode(prompt.answer), task.tokenizer.eos_id]
    assert task.verify(prompt, response).reward == float(response == right)
    assert task.verify(prompt, right).reward == 1.0
