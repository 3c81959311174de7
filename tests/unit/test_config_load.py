"""Loading recipes: values, overrides and every kind of refusal, through ``load_config``."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from perdure.config import (
    OPERATIONAL,
    DigestedAs,
    Problem,
    Section,
    config_digest,
    config_from_text,
    explained,
    load_config,
    render_yaml,
    sections,
)
from perdure.core.errors import ConfigError, NothingToResumeError


class Shade(enum.Enum):
    LIGHT = "light"
    DARK = "dark"


class Optimizer(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    kind: Literal["adamw", "sgd"] = "adamw"


class Files(Section):
    keep: Annotated[int, Field(ge=1)] = 2
    folder: Path = Path("out")


class Run(Section):
    name: str = "r"
    seed: int = 0
    mode: Literal["sync"] = "sync"
    batch: Annotated[int, Field(ge=1)] = 64
    parts: Annotated[int, Field(ge=1)] = 4
    on: bool = False
    shade: Shade = Shade.LIGHT
    optimizer: Optimizer = Optimizer()
    files: Annotated[Files, OPERATIONAL] = Files()
    extra: Files | None = None
    many: tuple[Files, ...] = ()
    seconds: Annotated[float, OPERATIONAL] = 1.0
    place: Annotated[Literal["here", "there"], DigestedAs("here")] = "here"

    def problems(self) -> Iterable[Problem]:
        if self.batch % self.parts:
            yield Problem(
                "batch",
                str(self.batch),
                f"must be a multiple of parts ({self.parts})",
                f"set batch={self.parts}",
                reads=("parts",),
            )


def load(text: str, *overrides: str) -> Run:
    return config_from_text(Run, text, where="r.yaml", overrides=overrides)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_values_overrides_and_defaults_come_together(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("seed: 3\noptimizer: {lr: 1e-5, betas: [0.5, 1]}\nshade: dark\n")
    run = load_config(Run, recipe, ["optimizer.kind=sgd", "extra.folder=a/b", "seed=4", "seed=5"])
    assert run == Run(
        seed=5,
        shade=Shade.DARK,
        optimizer=Optimizer(lr=1e-5, betas=(0.5, 1.0), kind="sgd"),
        extra=Files(folder=Path("a/b")),
    )


def test_an_empty_recipe_is_all_defaults() -> None:
    assert load("") == Run()


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load("").seed = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: off", "off"),
        ("name: yes", "yes"),
        ("name: 1:30", "1:30"),
        ("name: 2024-01-01", "2024-01-01"),
        ("name: '7'", "7"),
    ],
)
def test_plain_words_stay_text(text: str, expected: str) -> None:
    assert load(text).name == expected


@pytest.mark.parametrize(("text", "lr"), [("1e-4", 1e-4), (".5", 0.5), ("2.", 2.0), ("3", 3.0)])
def test_numbers_as_people_write_them(text: str, lr: float) -> None:
    assert load(f"optimizer: {{lr: {text}}}").optimizer.lr == lr


def test_a_leading_zero_is_not_octal() -> None:
    assert load("seed: 010").seed == 10


@pytest.mark.parametrize(
    ("text", "override", "sentence"),
    [
        (
            "seed: 1\nsede: 2",
            "",
            "r.yaml: sede = 2; unknown key; way out: did you mean 'seed'?",
        ),
        (
            "",
            "optimizer.l=1",
            "command line: optimizer.l = 1; unknown key; way out: did you mean 'optimizer.lr'?",
        ),
        ("", "lr=1", "command line: lr = 1; unknown key; way out: did you mean 'optimizer.lr'?"),
        (
            "",
            "files.qqq=1",
            "command line: files.qqq = 1; unknown key; way out: "
            "use one of: files.folder, files.keep",
        ),
        (
            "",
            "extra.kep=1",
            "command line: extra.kep = 1; unknown key; way out: did you mean 'extra.keep'?",
        ),
        (
            "seed: '7'",
            "",
            'r.yaml: seed = "7"; must be a valid integer; way out: set it to a whole number,'
            " for example seed=0",
        ),
        (
            "seed: 1.5",
            "",
            "r.yaml: seed = 1.5; must be a valid integer; way out: set it to a whole number,"
            " for example seed=0",
        ),
        (
            "on: 1",
            "",
            "r.yaml: on = 1; must be a valid boolean; way out: set it to true or false,"
            " for example on=false",
        ),
        (
            "optimizer: {lr: -1}",
            "",
            "r.yaml: optimizer.lr = -1; must be greater than 0; way out: set it to a number,"
            " above 0, for example optimizer.lr=0.0001",
        ),
        (
            "optimizer: {kind: adam}",
            "",
            "r.yaml: optimizer.kind = \"adam\"; must be 'adamw' or 'sgd';"
            " way out: did you mean 'adamw'?",
        ),
        (
            "shade: drak",
            "",
            "r.yaml: shade = \"drak\"; must be 'light' or 'dark'; way out: did you mean 'dark'?",
        ),
        (
            "optimizer: {betas: [0.1]}",
            "",
            "r.yaml: optimizer.betas.1 = (absent); is required;"
            " way out: add optimizer.betas.1 to the recipe",
        ),
        (
            "many: [{keep: 0}]",
            "",
            "r.yaml: many.0.keep = 0; must be greater than or equal to 1;"
            " way out: set it to a whole number, at least 1, for example many.0.keep=2",
        ),
        (
            "batch: 6",
            "",
            "r.yaml: batch = 6; must be a multiple of parts (4); way out: set batch=4",
        ),
        (
            "",
            "batch",
            "command line: batch = (no value); an override is key=value;"
            " way out: write it as section.key=value, e.g. seed=7",
        ),
        (
            "mode: async",
            "",
            "r.yaml: mode = \"async\"; must be 'sync'; way out: set mode=sync, or leave it out",
        ),
        (
            "files: 3",
            "",
            "r.yaml: files = 3; is a section; way out: set what lies in it: files.keep,"
            " files.folder",
        ),
        (
            "",
            "=3",
            "command line: =3 = (no key); an override is key=value;"
            " way out: write it as section.key=value, e.g. seed=7",
        ),
        (
            "",
            "a b=1",
            "command line: a b = 1; a key is names joined by dots;"
            " way out: write it as section.key=value, e.g. seed=7",
        ),
        (
            "",
            "seed=[1",
            "command line: seed = [1; not valid YAML: expected ',' or ']', but got"
            " '<stream end>'; way out: quote the value for YAML and for the shell",
        ),
        (
            "seed: 1",
            "seed.x=1",
            "command line: seed.x = 1; seed is a value, not a section; way out: set seed itself",
        ),
    ],
)
def test_a_refusal_has_four_parts(text: str, override: str, sentence: str) -> None:
    assert refusal(text, *([override] if override else [])) == sentence


def test_all_problems_are_reported_at_once() -> None:
    message = refusal("sede: 1\noptimizer: {lr: 0}\nbatch: 5", "on=7", "files.keep=x")
    assert message.startswith("r.yaml: 5 problems:")
    for part in ("r.yaml: sede", "r.yaml: optimizer.lr", "r.yaml: batch = 5", "command line: on"):
        assert part in message
    assert "command line: files.keep" in message


def test_a_rule_is_silent_about_a_field_that_is_itself_wrong() -> None:
    assert refusal("parts: x\nbatch: 5") == (
        'r.yaml: parts = "x"; must be a valid integer;'
        " way out: set it to a whole number, at least 1, for example parts=4"
    )


def test_rules_of_inner_sections_name_the_whole_path() -> None:
    class Outer(Section):
        run: Run = Run()
        runs: tuple[Run, ...] = ()

    with pytest.raises(ConfigError) as caught:
        config_from_text(Outer, "run: {batch: 6}\nruns: [{}, {batch: 7}]", where="r.yaml")
    assert "run.batch = 6" in str(caught.value)
    assert "way out: set run.batch=4" in str(caught.value)
    assert "runs.1.batch = 7" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "r.yaml:1:5: not valid YAML"),
        ("seed: 1\nseed: 2", "r.yaml:2:1: not valid YAML: the key 'seed' appears twice"),
        ("optimizer: {lr: 1, lr: 2}", "the key 'lr' appears twice"),
        ("? [1, 2]\n: 3", "a key must be plain text"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("seed: \x00", "not valid YAML"),
        ("- 1\n- 2", "r.yaml: holds a list; a recipe is a mapping of sections"),
        ("seven", "r.yaml: holds a str"),
        ("seed: !!python/object:os.system x", "not valid YAML"),
        ("seed: .inf", "r.yaml: seed"),
        ("optimizer: {lr: .nan}", "r.yaml: optimizer.lr"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, part: str) -> None:
    assert part in refusal(text)


def test_a_key_with_a_dot_is_an_unknown_key() -> None:
    assert "many.x.y" in refusal("many: []\nmany.x.y: 1")


def test_a_missing_recipe_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "sort_digits.yaml").write_text("")
    (tmp_path / "other.yml").write_text("")
    with pytest.raises(NothingToResumeError, match="did you mean '.*sort_digits.yaml'") as caught:
        load_config(Run, tmp_path / "sort_digit.yaml")
    assert caught.value.exit_code == 6
    with pytest.raises(NothingToResumeError, match=r"use one of: .*other.yml.*sort_digits.yaml"):
        load_config(Run, tmp_path / "zzz.yaml")


def test_a_missing_recipe_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NothingToResumeError, match="name an existing YAML file"):
        load_config(Run, tmp_path / "nowhere" / "r.yaml")


def test_an_unreadable_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Run, tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Run, tmp_path / "latin.yaml")


def test_the_digest_covers_arithmetic_and_nothing_else() -> None:
    base = config_digest(Run())
    assert config_digest(Run(files=Files(keep=9), seconds=2.0, place="there")) == base
    assert config_digest(load("extra: null")) == base
    different = [Run(seed=1), Run(optimizer=Optimizer(lr=1e-5)), Run(many=(Files(),))]
    digests = {config_digest(run) for run in different}
    assert base not in digests
    assert len(digests) == 3


def test_the_rendered_file_loads_to_the_same() -> None:
    run = Run(name="1e-4", extra=Files(folder=Path("x")), many=(Files(), Files(keep=7)))
    assert load(render_yaml(run)) == run


def test_the_explained_file_loads_to_the_same_and_says_what_things_mean() -> None:
    run = Run(name="1e-4", optimizer=Optimizer(lr=1e-5), many=(Files(), Files(keep=7)))
    text = explained(run)
    assert load(text) == run
    assert "  # (a number, above 0)\n  lr: 1.0e-05\n" in text
    assert "kind" not in explained(run, leave_out={"optimizer"})


def test_what_is_left_out_has_its_default() -> None:
    text = render_yaml(Run(seed=3), leave_out={"optimizer.lr", "extra.keep"})
    assert "lr:" not in text
    assert load(text) == Run(seed=3)


def test_the_reference_has_the_defaults_that_a_section_has_in_its_place() -> None:
    class Outer(Section):
        files: Files = Files(keep=5)
        limit: Annotated[float | None, Field(gt=0)] = None
        given: bool

    found = {s.key: s for section in sections(Outer) for s in section.settings}
    assert found["files.keep"].default == "5"
    assert found["files.keep"].kind == "a whole number, at least 1"
    assert found["limit"].kind == "a number, above 0 or null"
    assert found["given"].default is None
