"""Writes ``docs/settings.md`` from the sections: ``python tools/settings_page.py``.

A test compares the page with what this would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from perdure.config import sections
from perdure.config.reference import Setting
from perdure.trainers.config import RunConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

_HEAD = """\
# Settings

Every key of a recipe, what it takes, and what it is if the recipe does not say. On the command
line a key is written with its section: `learner.kl.coef=0.01`. `perdure config show RECIPE
--explain` prints the same beside the values of a recipe; [Configuration](configuration.md) says
how values are read.

This page is made by `python tools/settings_page.py` from the sections themselves.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_body()])


def _body() -> Iterator[str]:
    for section in sections(RunConfig):
        yield f"## `{section.key}`" if section.key else "## The outermost keys"
        yield f"\n{section.text}\n"
        if section.settings:
            yield "| key | takes | default | meaning |\n|---|---|---|---|"
            yield from (_row(setting) for setting in section.settings)
            yield ""


def _row(setting: Setting) -> str:
    name = setting.key.rpartition(".")[2]
    default = "must be given" if setting.default is None else f"`{setting.default}`"
    cells = [f"`{name}`", setting.kind, default, setting.text]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
