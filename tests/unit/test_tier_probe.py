"""``perdure doctor --remote``: a missing right, and a store that replaces whatever it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ckpt_cases import perdure
from fault_proxy import Fault, FaultProxy
from object_servers import BUCKET, S3Server, new_prefix, s3_objects, s3_server
from obstore.store import MemoryStore

from perdure.checkpoint.tier import ObjectStore, ObstoreObjects, probe_objects
from perdure.cli import doctor
from perdure.core.clock import SystemClock


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def failed(objects: ObjectStore) -> dict[str, str]:
    findings = probe_objects(objects, clock=SystemClock())
    return {finding.name: finding.text for finding in findings if finding.grade == "failed"}


@pytest.mark.parametrize(
    ("method", "target", "names"),
    [
        ("PUT", "", ["remote write"]),
        ("GET", "/probe/", ["remote read", "remote swap", "remote delete"]),
        ("GET", "list-type", ["remote list"]),
        ("POST", "delete", ["remote delete"]),
    ],
)
def test_a_missing_right_is_named(
    server: S3Server, method: str, target: str, names: Sequence[str]
) -> None:
    with FaultProxy(server.address) as proxy:
        objects = s3_objects(proxy.url, new_prefix())
        proxy.plan = lambda how, what: Fault.FORBIDDEN if how == method and target in what else None
        found = failed(objects)
    assert list(found) == names
    assert all("refuses access" in text or "403" in text for text in found.values())
    assert proxy.struck[Fault.FORBIDDEN] == len(names)


def test_a_store_that_ignores_conditions_is_found_out() -> None:
    class Careless(ObstoreObjects):
        def create(self, key: str, data: Any) -> bool:
            self.overwrite(key, data)
            return True

    class Hasty(ObstoreObjects):
        def swap(self, key: str, data: Any, *, expected: str | None) -> str | None:
            self.overwrite(key, data)
            return self.read_tagged(key)[1]

    class Keeping(ObstoreObjects):
        def delete(self, keys: Sequence[str]) -> None:
            pass

    for kind, name, what in (
        (Careless, "remote write", "that is there was overwritten"),
        (Hasty, "remote swap", "that had changed was replaced"),
        (Keeping, "remote delete", "still there"),
    ):
        found = failed(kind(MemoryStore()))
        assert list(found) == [name]
        assert what in found[name]


def test_doctor_tries_the_remote_tier(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "WRITE_BYTES", 1 << 20)
    for name, value in (
        ("ACCESS_KEY_ID", "t"),
        ("SECRET_ACCESS_KEY", "t"),
        ("REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    with FaultProxy(server.address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        url = f"s3://{BUCKET}/{new_prefix()}"
        code, out, _ = perdure("doctor", tmp_path, "--remote", url)
        assert code == 0
        assert "ok       remote delete gone at once" in out
        proxy.plan = lambda method, target: Fault.FORBIDDEN
        code, out, err = perdure("doctor", tmp_path, "--remote", url)
    assert code == 7
    assert "checks failed: remote write" in err
    assert "failed   remote write  " in out
