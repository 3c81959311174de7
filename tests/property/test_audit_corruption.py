"""Any change of a closed run's bytes is noticed: flips, cuts, losses, copies of other files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import audit_writer as w
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.audit import audit_run
from perdure.core.errors import FutureFormatError, NothingToResumeError


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two incarnations, the last one closed in order, so that nothing is a tail."""
    run = w.healthy(tmp_path_factory.mktemp("closed") / "run")
    run.incarnations[2].write(w.closed(2))
    run.incarnations[2].seal(2)
    path = run.save()
    assert audit_run(path).ok
    return path


def _says_the_same(name: str, one: bytes, other: bytes) -> bool:
    """Whether two JSON files hold one object: an escape may be written in two ways."""
    if not name.endswith(".json"):
        return False
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@settings(max_examples=150)
@given(data=st.data())
def test_every_change_is_noticed(closed: Path, data: st.DataObject) -> None:
    names = sorted(
        str(path.relative_to(closed))
        for path in closed.rglob("*")
        if path.is_file() and path.parent.name != "metrics"
    )
    name = data.draw(st.sampled_from(names))
    content = (closed / name).read_bytes()
    change = data.draw(st.sampled_from(["flip", "cut", "delete", "copy"]))
    if change == "flip":
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
    elif change == "cut":
        changed = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        other = data.draw(st.sampled_from([n for n in names if n != name]))
        changed = (closed / other).read_bytes()
    if changed == content or _says_the_same(name, bytes(changed), content):
        return
    broken = closed.parent / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(closed, broken)
    (broken / name).unlink()
    if change != "delete":
        (broken / name).write_bytes(changed)
    try:
        report = audit_run(broken)
    except (FutureFormatError, NothingToResumeError):
        return
    # Without the seal of its orderly end the newest incarnation reads like a killed one.
    harmless = (name, change) == ("seals/2.json", "delete")
    assert report.ok == harmless, (name, change)
