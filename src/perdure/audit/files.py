"""What lies beside the log and must agree with it: checkpoints and metrics."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from perdure.audit.history import Event
from perdure.audit.parts import PARTS_RULE, parts_problems
from perdure.audit.report import Findings
from perdure.audit.sealed import read_sealed
from perdure.core.errors import FutureFormatError

FILES_RULE = "a committed checkpoint has every file of its manifest, byte for byte"
COMMIT_RULE = "a commit and its manifest name the same step and the same place in the log"
POSITION_RULE = "a checkpoint is staged behind durable records, which are never cut off"
_MANIFEST_NAMES = ("features", "name", "position", "files")
_KNOWN_FEATURES = {"segments", "legacy", "ranks", "grouped", "chunks"}
METRICS_RULE = "every row of a metrics file comes from a record of the log"


class Row(NamedTuple):
    """A row of a metrics file."""

    where: str
    global_step: int
    digest: str


def require_readable(run: Path) -> None:
    """What cannot be read is not absent, as which ``glob`` would show it.

    Raises:
        OSError: A directory of the run cannot be read.
    """
    for name in ("", "log", "incarnations", "seals", "checkpoints", "metrics"):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(run / name)


def check_checkpoint(run: Path, commit: Event, findings: Findings) -> int:
    """Check one committed checkpoint; returns its bytes.

    Raises:
        FutureFormatError: Its manifest is of a newer format, or needs what this version lacks.
    """
    directory = commit.fields["directory"]
    root, where = run / "checkpoints" / directory, f"checkpoints/{directory}"
    if not root.exists() and (run / "quarantine" / f"{directory}.reason.json").exists():
        findings.note(where, "it was damaged and lies in quarantine", FILES_RULE)
        return 0
    if not root.exists() and directory in _not_fetched(run, findings):
        findings.note(where, "it was not fetched from the remote tier", FILES_RULE)
        return 0
    path = root / "manifest.json"
    if not path.exists():
        findings.damage(f"{where}/manifest.json", "the file is missing", FILES_RULE)
        return 0
    if xxhash.xxh3_128_hexdigest(path.read_bytes()) != commit.fields["manifest_digest"]:
        findings.damage(f"{where}/manifest.json", "it is not the committed one", FILES_RULE)
        return 0
    manifest = read_sealed(path, findings, where=f"{where}/manifest.json", names=_MANIFEST_NAMES)
    if manifest is None:
        return 0
    unknown = sorted(set(manifest["features"]) - _KNOWN_FEATURES)
    if unknown:
        raise FutureFormatError(
            f"needs features this version does not know: {', '.join(unknown)}",
            where=str(path),
            way_out="use the perdure version that wrote it, or a newer one",
        )
    said = [manifest["name"]["phase"], manifest["name"]["step"], manifest["position"]]
    logged = [commit.fields[name] for name in ("phase", "step", "position")]
    if said != logged:
        findings.violation(commit.where, f"{directory} is {said}, logged as {logged}", COMMIT_RULE)
    for problem in parts_problems(manifest.get("components", {})):
        findings.damage(f"{where}/manifest.json", problem, PARTS_RULE)
    return _check_files(run, directory, manifest, findings)


def _not_fetched(run: Path, findings: Findings) -> list[str]:
    """What the remote tier holds, in a run that was pulled from it in part."""
    pins = run / "remote.json"
    if not (run / "pulled.json").exists() or not pins.exists():
        return []
    found = read_sealed(pins, findings, where=pins.name, names=("pinned",))
    return [] if found is None else list(found["pinned"])


def _check_files(run: Path, directory: str, manifest: dict[str, Any], findings: Findings) -> int:
    """Check every file and every segment that a manifest names; returns their bytes."""
    where = f"checkpoints/{directory}"
    files = {f"{where}/{name}": entry for name, entry in manifest["files"].items()}
    stored = [one for each in manifest.get("segments", {}).values() for one in each]
    files |= {entry["path"]: entry for entry in stored}
    for path, entry in files.items():
        problem = _file_problem(run / path, entry)
        if problem:
            findings.damage(path, problem, FILES_RULE)
    return sum(entry["bytes"] for entry in files.values())


def check_positions(run: Path, run_id: str, findings: Findings) -> None:
    """The log has every place that a checkpoint on disk refers to, committed or not.

    Besides the place its state stands behind, that is the end of the log when it was staged.
    """
    for path in sorted((run / "checkpoints").glob("*/manifest.json")):
        where = f"checkpoints/{path.parent.name}/manifest.json"
        # What a manifest should be is judged with its commit; one that is damaged proves nothing.
        manifest = read_sealed(path, Findings(), where=where, names=("position", "lineage"))
        if manifest is None or manifest["lineage"].get("run_id") != run_id:
            continue
        ends = [manifest["position"], manifest["lineage"].get("log_end", manifest["position"])]
        for incarnation, segment, offset in {tuple(end): None for end in ends}:
            log = run / "log" / f"control-{incarnation:06d}-{segment:06d}.plog"
            size = log.stat().st_size if log.is_file() else 0
            if size < offset:
                what = f"{size} bytes, {where} refers to byte {offset}"
                findings.damage(f"log/{log.name}", what, POSITION_RULE)


def _file_problem(path: Path, entry: Mapping[str, Any]) -> str:
    if not path.is_file():
        return "the file is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{size} bytes, the manifest says {entry['bytes']}"
    # A file has a checksum of its own, one for each chunk, or both, as older versions wrote it.
    said = [entry["xxh3_128"]] if "xxh3_128" in entry else []
    right = not said or said == file_digests(path)
    if "chunks" in entry:
        chunks = entry["chunks"]
        right = right and file_digests(path, chunks["bytes"]) == chunks["xxh3_128"]
    return "" if right and (said or "chunks" in entry) else "the checksum does not match"


def file_digests(path: Path, step: int = sys.maxsize) -> list[str]:
    """xxh3-128 hex of each ``step`` bytes of a file; of an empty one, of nothing."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if not size:
            return [xxhash.xxh3_128_hexdigest(b"")]
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            return [
                xxhash.xxh3_128_hexdigest(data[start : start + step])
                for start in range(0, size, step)
            ]


def read_metrics(run: Path, findings: Findings) -> list[Row]:
    """Rows of ``metrics/*.jsonl``. A torn last line is normal, another unreadable one is noted."""
    rows: list[Row] = []
    for path in sorted((run / "metrics").glob("*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            where = f"metrics/{path.name} line {number}"
            try:
                value = json.loads(line)
                rows.append(Row(where, int(value["global_step"]), str(value["digest"])))
            except (KeyError, TypeError, ValueError, OverflowError):
                findings.note(where, "not a row of metrics", "the next start writes them again")
    return rows


def check_metrics(rows: list[Row], known: set[tuple[int, str]], findings: Findings) -> None:
    """Every row must be known: rows are written after their record is acknowledged."""
    for row in rows:
        if (row.global_step, row.digest) not in known:
            findings.damage(
                row.where,
                f"step {row.global_step} with digest {row.digest} is not in the log:"
                " the log is shorter than its metrics",
                METRICS_RULE,
            )
