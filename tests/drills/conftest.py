"""One fork server and one uninterrupted reference run per test process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_tools import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def reference(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run that nothing happened to."""
    run = tmp_path_factory.mktemp("reference") / "run"
    ended = server.run("train", run)
    assert ended.status == 0, ended.log
    return run
