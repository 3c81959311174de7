"""Tasks and tools of the user's own: the examples of the documentation, and what is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perdure.cli import main as cli

ROOT = Path(__file__).parents[2]
SMALL = (
    "model={hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, intermediate_size: 32}",
    "trainer={total_steps: 2, train_batch_size: 2}",
    "validation={prompts: 4}",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A working directory of its own, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in {"mytask", "mytools"} & (set(sys.modules) - before):
        del sys.modules[name]


def blocks(page: str, language: str, section: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def perdure(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_task_of_the_documentation_trains_is_asked_and_resumed(folder: Path) -> None:
    (code,) = blocks("tasks.md", "python", "Your own task")
    (recipe,) = blocks("tasks.md", "yaml", "Your own task")
    (folder / "mytask.py").write_text(code)
    (folder / "largest.yaml").write_text(recipe)
    small = (*SMALL, "learner.supervised.steps=4")
    assert perdure("train", "largest.yaml", *small)[0] == 0
    run = folder / "runs/largest-1"
    assert "mytask:largest_digit" in (run / "config.yaml").read_text()
    assert perdure("sample", str(run), "--prompts", "4")[0] == 0
    assert perdure("resume", str(run))[0] == 0
    assert perdure("audit", str(run))[0] == 0
    del sys.modules["mytask"]
    (folder / "mytask.py").write_text(code.replace('{"digits": 5}', '{"digits": 6}'))
    status, said = perdure("resume", str(run))
    assert (status, "the data has changed since the run was started" in said) == (2, True), said
    del sys.modules["mytask"]
    (folder / "mytask.py").unlink()
    status, said = perdure("resume", str(run))
    assert status == 2
    assert "cannot be imported (ModuleNotFoundError: No module named 'mytask')" in said


def test_the_tool_of_the_documentation_is_called_in_training(folder: Path) -> None:
    (code,) = blocks("agents.md", "python", "Your own tool")
    # The first call is enough to know which tool answers.
    code = code.replace(
        "left, plus", "import pathlib; pathlib.Path('called').touch()\n        left, plus", 1
    )
    (folder / "mytools.py").write_text(code)
    shape = (
        "task.calculator={min_digits: 1, max_digits: 1, tool_demonstrations: 1.0}",
        "learner.supervised={steps: 60, batch_size: 32, lr: 1.0e-2}",
        "rollout.slots=16",
        *SMALL,
    )
    recipe = str(ROOT / "recipes/calculator.yaml")
    status, said = perdure("train", recipe, "agent.tools=[mytools:Adder]", *shape, "--run", "own")
    assert status == 0, said
    assert (folder / "called").exists()
    assert perdure("audit", "own")[0] == 0


TASK = "task={name: 'mytask:Mine'}"
TOOL = "agent={loop: tools, tools: ['mytools:Mine']}"


@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        (TASK, None, "No module named 'mytask'"),
        (TASK, "1/0", "cannot be imported (ZeroDivisionError: division by zero)"),
        (TASK, "raise SystemExit", "cannot be imported (SystemExit)"),
        (TASK, "Other = 1", "has no attribute 'Mine'"),
        (TASK, "Mine = 1", "is neither a class nor a function"),
        (TASK, "def Mine(): ...", "cannot be called (TypeError: Mine() takes 0 positional"),
        (TASK, "class Mine:\n def __init__(self, seed): self.name = 'x'", "Mine that lacks token"),
        (TOOL, None, "No module named 'mytools'"),
        (TOOL, "class Mine: name = 'x'", "gives a Mine that lacks parameters, kind, call"),
        (TOOL, "class Mine: name = parameters = kind = call = 'x'", "its kind is 'x'"),
        (
            TOOL,
            "from perdure.core.agent_api import ToolKind\n"
            "class Mine: name = parameters = call = 'x'; kind = ToolKind.RESTART",
            "lacks replay, forget",
        ),
    ],
)
def test_what_cannot_be_used_is_one_sentence_before_the_run(
    folder: Path, setting: str, code: str | None, said: str
) -> None:
    if code is not None:
        (folder / ("mytask.py" if setting is TASK else "mytools.py")).write_text(code)
    status, output = perdure("train", str(ROOT / "recipes/tiny.yaml"), setting, "--run", "own")
    assert (status, said in output, "Traceback" in output) == (2, True, False), output
    assert "run the command where the module lies" in output or "kind" in output
    assert not (folder / "own").exists()


def test_two_tools_of_one_name_are_refused(folder: Path) -> None:
    (folder / "mytools.py").write_text(blocks("agents.md", "python", "Your own tool")[0])
    both = "agent={loop: tools, tools: [calculator, 'mytools:Adder']}"
    status, output = perdure("train", str(ROOT / "recipes/tiny.yaml"), both, "--run", "own")
    assert (status, "two tools are called calculator" in output) == (2, True), output
