"""Links in the documentation lead somewhere, and the README knows every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import settings_page
import typer.main

from perdure.cli.main import app
from perdure.config import load_config, sections
from perdure.trainers.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f"({page})" not in index} == {"index.md"}


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    for name, command in typer.main.get_command(app).commands.items():
        for inner in getattr(command, "commands", {None: None}):
            full = f"`perdure {name} {inner}" if inner else f"`perdure {name} "
            assert full in readme


def test_the_settings_page_is_what_the_sections_say() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "python tools/settings_page.py"


def test_every_setting_is_explained() -> None:
    silent = [
        setting.key
        for section in sections(RunConfig)
        for setting in section.settings
        if not setting.text
    ]
    assert silent == []


def test_make_demo_and_make_test_come_first() -> None:
    code = [line for line in (ROOT / "README.md").read_text().splitlines() if line[:4] == "    "]
    assert [line.split("#")[0].strip() for line in code[:2]] == ["make demo", "make test"]


def test_the_checkpoints_of_the_examples_are_those_that_a_finished_run_keeps() -> None:
    config = load_config(RunConfig, ROOT / "recipes" / "tiny.yaml")
    total, every, keep = (
        config.trainer.total_steps,
        config.checkpoint.every_steps,
        config.checkpoint.keep,
    )
    kept = {f"step-{step:08}-1" for step in range(0, total + 1, every or 1)[-keep:]}
    texts = [path.read_text() for path in (ROOT / "src/perdure/cli").glob("*.py")]
    named = {name for text in texts for name in re.findall(r"step-\d+-\d+", text)}
    assert named
    assert named <= kept
