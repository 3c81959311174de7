from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from perdure.core.errors import ConfigError
from perdure.tasks.api import Prompt, require_same_data
from perdure.tasks.jsonl import JsonlOptions, JsonlTask, jsonl_task
from perdure.tasks.samples import min_max_jsonl

REPOSITORY = Path(__file__).parents[2]


def write(path: Path, *lines: Mapping[str, object] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def make(path: Path, seed: int = 1, **options: object) -> JsonlTask:
    return jsonl_task(JsonlOptions.model_validate({"path": str(path), **options}), seed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    lines = [{"prompt": f"{i}?", "answer": f"{i + 1}"} for i in range(100)]
    return write(tmp_path / "data.jsonl", *lines)


def test_an_epoch_shows_every_training_example_once_in_a_new_order(path: Path):
    task = make(path)
    size = 100 - len(list(iter_held_out(task)))
    epochs = [[task.prompt(epoch * size + i).prompt_ids for i in range(size)] for epoch in range(3)]
    assert all(set(Counter(epoch).values()) == {1} for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def iter_held_out(task: JsonlTask) -> list[Prompt]:
    count = 0
    while True:
        try:
            found = task.held_out(count + 1)
        except ConfigError:
            return task.held_out(count)
        count = len(found)


def test_a_prompt_with_two_answers_is_refused_with_both_lines(tmp_path: Path):
    path = write(
        tmp_path / "two.jsonl",
        {"prompt": "a", "answer": "x y"},
        {"prompt": "b", "answer": "z"},
        {"prompt": "a", "answer": "x  y"},
        {"prompt": "b", "answer": "Z"},
    )
    with pytest.raises(ConfigError) as caught:
        make(path, held_out_fraction=0.5)
    assert f"1 bad line(s): {path}:4: the prompt has another answer in {path}:2" in str(
        caught.value
    )
    with pytest.raises(ConfigError, match="2 bad line"):
        make(path, match="exact")
    assert make(write(path, *path.read_text().splitlines(), *more()), match="spaces_and_case")


def more() -> list[Mapping[str, object]]:
    return [{"prompt": f"{i}?", "answer": f"{i}"} for i in range(50)]


def test_fewer_held_out_prompts_only_when_that_is_enough(path: Path):
    task = make(path)
    everything = iter_held_out(task)
    assert task.held_out(512, or_fewer=True) == everything
    assert task.held_out(3, or_fewer=True) == everything[:3]
    with pytest.raises(ConfigError, match=f"set validation.prompts={len(everything)}"):
        task.held_out(512)


def test_all_bad_lines_are_named_at_once(tmp_path: Path):
    path = write(
        tmp_path / "bad.jsonl",
        {"prompt": "a", "answer": "b"},
        "{not json",
        "",
        "[1]",
        {"prompt": "a"},
        {"prompt": "a", "answer": 3},
        {"prompt": "", "answer": "b"},
        {"promt": "a", "answer": "b"},
        {"prompt": "a", "answer": "b", "demonstration": "c"},
        '{"prompt": "\\ud800", "answer": "b"}',
        "[" * 100_000,
    )
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff", "answer": "b"}\n')
    with pytest.raises(ConfigError) as caught:
        make(path)
    text = str(caught.value)
    expected = {
        2: "not JSON",
        4: "not a JSON object",
        5: "'answer' is missing",
        6: "'answer' must be text",
        7: "'prompt' must be text",
        8: "unknown key 'promt', did you mean 'prompt'?",
        9: "the demonstration is not judged right",
        10: "half of a surrogate pair",
        11: "nested too deeply",
        12: "not UTF-8 at byte 12",
    }
    for line, problem in expected.items():
        assert f"{path}:{line}: {problem}" in text
    assert ":3:" not in text


def test_the_list_of_bad_lines_is_bounded(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"500 bad line\(s\).*and 490 more") as caught:
        make(write(tmp_path / "bad.jsonl", *["x"] * 500))
    assert len(str(caught.value)) < 3_000


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_examples_is_refused(tmp_path: Path, content: str):
    with pytest.raises(ConfigError, match="no example"):
        make(write(tmp_path / "empty.jsonl", content))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: cannot be read.*task\.jsonl\.path=FILE"):
        make(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        make(tmp_path)


def test_an_empty_side_of_the_split_is_refused(tmp_path: Path):
    path = write(tmp_path / "one.jsonl", {"prompt": "a", "answer": "b"})
    with pytest.raises(ConfigError, match="held-out side of 1 examples is empty"):
        make(path, held_out_fraction=1e-9)
    with pytest.raises(ConfigError, match="training side of 1 examples is empty"):
        make(path, held_out_fraction=1 - 1e-9)


def test_a_held_out_file_is_used_whole(tmp_path: Path, path: Path):
    other = write(tmp_path / "test.jsonl", *[{"prompt": f"{i}!", "answer": "x"} for i in range(9)])
    task = make(path, held_out_path=str(other))
    decode = task.tokenizer.decode
    assert [decode(p.prompt_ids) for p in task.held_out(9)] == [f"{i}!" for i in range(9)]
    assert len({task.prompt(i).prompt_ids for i in range(100)}) == 100


def test_a_prompt_in_both_files_is_refused(tmp_path: Path, path: Path):
    other = write(
        tmp_path / "test.jsonl",
        {"prompt": "7?", "answer": "8"},
        {"prompt": "!", "answer": "8"},
        {"prompt": "!", "answer": "8"},
    )
    with pytest.raises(ConfigError) as caught:
        make(path, held_out_path=str(other))
    assert f"{other}:1: the prompt is already in {path}:8" in str(caught.value)
    assert f"{other}:3: the prompt is already in {other}:2" in str(caught.value)


def test_a_repeated_prompt_stays_on_one_side(tmp_path: Path):
    lines = [{"prompt": f"{i % 20}?", "answer": str(i % 20)} for i in range(200)]
    task = make(write(tmp_path / "data.jsonl", *lines), held_out_fraction=0.5)
    held_out = {p.prompt_ids for p in iter_held_out(task)}
    trained = {task.prompt(i).prompt_ids for i in range(400)}
    assert held_out
    assert not held_out & trained
    assert len(held_out | trained) == 20


def test_a_changed_file_is_noticed(path: Path):
    before = make(path).dataset_digest
    assert make(path).dataset_digest == before
    path.write_text(path.read_text().replace('"99?"', '"100?"'))
    with pytest.raises(ConfigError, match="data has changed"):
        require_same_data(make(path), before)


def test_the_digest_follows_the_content_not_the_place(tmp_path: Path, path: Path):
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(path.read_bytes())
    assert make(moved).dataset_digest == make(path).dataset_digest
    others = [
        make(path, seed=2),
        make(path, held_out_fraction=0.2),
        make(path, match="exact"),
        make(path, tokenizer="bytes"),
        make(path, alphabet="9876543210?x"),
    ]
    assert len({task.dataset_digest for task in [make(path), *others]}) == 6


def test_an_alphabet_is_checked_line_by_line(path: Path):
    with pytest.raises(ConfigError, match=r"data\.jsonl:10: characters outside the alphabet: '9'"):
        make(path, alphabet="012345678?")


@pytest.mark.parametrize(
    ("match", "response", "right"),
    [
        ("exact", "a B", True),
        ("exact", "a  B", False),
        ("spaces", " a  B", True),
        ("spaces", "a b", False),
        ("spaces_and_case", " A b ", True),
        ("spaces_and_case", "ab", False),
    ],
)
def test_answers_are_compared_as_configured(tmp_path: Path, match: str, response: str, right: bool):
    lines = [{"prompt": f"{i}", "answer": "a B"} for i in range(50)]
    task = make(write(tmp_path / "d.jsonl", *lines), match=match, tokenizer="bytes")
    ids = (*task.tokenizer.encode(response), task.tokenizer.eos_id)
    assert task.verify(task.prompt(0), ids).parts["correct"] == float(right)


def test_a_marker_lets_a_response_lead_to_its_answer(tmp_path: Path):
    lines = [
        {"prompt": f"{i}+1", "answer": str(i + 1), "demonstration": f"#{i} and one #{i + 1}"}
        for i in range(60)
    ]
    task = make(write(tmp_path / "d.jsonl", *lines), answer_marker="#")
    prompt, demonstration = task.prompt(0), task.demonstration(0)
    assert "and one" in task.tokenizer.decode(demonstration.response_ids)
    assert task.max_answer_tokens == len("#58 and one #59") + 1

    def correct(text: str) -> float:
        ids = (*task.tokenizer.encode(text), task.tokenizer.eos_id)
        return task.verify(prompt, ids).reward

    assert correct(f"#1#{prompt.answer}") == 1.0
    assert correct(prompt.answer) == 0.0
    assert correct(f"#{prompt.answer}#1") == (1.0 if prompt.answer == "1" else 0.0)


def test_the_example_file_is_what_the_function_makes():
    stored = (REPOSITORY / "recipes" / "data" / "min_max.jsonl").read_text()
    assert stored == min_max_jsonl()
    prompts = [json.loads(line)["prompt"] for line in stored.splitlines()]
    assert len(set(prompts)) == len(prompts) == 480


def test_the_example_answers_are_right():
    for line in min_max_jsonl(seed=1, count=100).splitlines():
        example = json.loads(line)
        word, *digits, _ = example["prompt"].split()
        assert example["answer"] == {"min": min, "max": max}[word](digits)
