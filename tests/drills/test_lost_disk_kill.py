"""SIGKILL, and the disk is gone as well: the run goes on from its remote tier, and is proven."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ckpt_cases import perdure
from drill_tools import KILLED, ForkServer, assert_same_results

from perdure.audit import audit_run


@pytest.mark.parametrize("hit", [1, 3, 6])
def test_killed_and_its_disk_is_lost(
    server: ForkServer, reference: Path, tmp_path: Path, hit: int
) -> None:
    """Nothing but killed incarnations: no seal was written, so none was shipped."""
    run = tmp_path / "run"
    shipped = f"checkpoint.remote=file://{tmp_path}/tier"
    plan = [{"point": "remote_head_swapped", "hit": hit}]
    ended = server.run("train", run, plan=plan, overrides=(shipped,))
    assert ended.status == KILLED, ended.log
    assert not list((run / "seals").iterdir())
    shutil.rmtree(run)
    code, _, err = perdure("resume", run, shipped)
    assert code == 0, err
    assert_same_results(run, reference)
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())
