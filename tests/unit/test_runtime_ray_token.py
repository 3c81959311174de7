"""Which token Ray is told to show: where it looks itself, unless the environment has decided."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.runtime.ray.token import show_token


def shown(environment: dict[str, str]) -> str | None:
    show_token(environment)
    return environment.get("RAY_AUTH_MODE")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("0" * 64)
    return path


def test_a_token_is_shown_wherever_ray_looks_for_it(tmp_path: Path, token_file: Path) -> None:
    assert shown({"HOME": str(tmp_path)}) == "token"
    assert shown({"RAY_AUTH_TOKEN": "0" * 64}) == "token"
    assert shown({"RAY_AUTH_TOKEN_PATH": str(token_file)}) == "token"


def test_without_a_token_nothing_is_said(tmp_path: Path, token_file: Path) -> None:
    assert shown({}) is None
    assert shown({"HOME": str(tmp_path / "other")}) is None
    # Ray does not look further than the file that is named.
    assert shown({"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}) is None


def test_what_the_environment_says_stands(tmp_path: Path, token_file: Path) -> None:
    assert shown({"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}) == "disabled"
    assert token_file.exists()
