"""The run's log as its files have it: every record of every incarnation that counts.

The second reader that ``docs/formats/log.md`` asks for, written from that page and from nothing
else. It only reads, and it may read beside a live writer.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from perdure.audit.report import Findings
from perdure.audit.sealed import read_sealed
from perdure.audit.segments import Record, Segment, StreamName, read_segment
from perdure.audit.streams import SealedSegment, StreamLog, StreamReader
from perdure.core.errors import NothingToResumeError, RunBusyError

ATTEMPTS = 5
"""How often a log is read again because an incarnation began or ended meanwhile."""

_SEGMENT_NAME = re.compile(r"(control|payload)-([0-9]{6,})-([0-9]{6,})\.plog")
_NUMBERED_NAME = re.compile(r"([1-9][0-9]*)\.json")
_RUN_NAMES = ("run_id", "created_wall_s", "versions", "config_digest", "dataset_digest")
_NAMES = {
    "incarnations": ("run_id", "incarnation", "host", "pid", "started_wall_s", "took_over"),
    "seals": ("run_id", "incarnation", "sealed_by", "segments"),
}
_SHOWN_MISSING = 50
_ORDER_RULE = "incarnations follow each other without gaps and each older one is sealed"

SegmentPaths = dict[int, dict[int, Path]]
"""Incarnation → segment number → file."""


@dataclass(frozen=True, slots=True)
class IncarnationLog:
    """Both streams of an incarnation."""

    control: StreamLog
    payload: StreamLog


@dataclass(frozen=True, slots=True)
class RunLog:
    """Everything that the log of a run says, by incarnation."""

    run_id: str
    incarnations: Mapping[int, IncarnationLog]
    claimed: int
    """Number of incarnation files."""
    sealed: int
    """Number of seals."""
    has_recipe: bool = True
    """Whether ``run.json`` names a configuration; the run of a script has none."""

    def payloads(self) -> dict[tuple[int, int, int], tuple[Segment, Record]]:
        """Payload records that count, by incarnation, segment and offset."""
        return {
            (number, segment.number, record.offset): (segment, record)
            for number, log in self.incarnations.items()
            for segment, records in log.payload.parts
            for record in records
        }


def read_log(run: Path, findings: Findings) -> RunLog:
    """Read the log of a run.

    Args:
        run: The run directory.
        findings: Receives every damage.

    Raises:
        NothingToResumeError: There is no run.
        FutureFormatError: A newer version has written part of it.
        RunBusyError: Incarnations begin faster than the log can be read.
    """
    for _ in range(ATTEMPTS):
        fresh = Findings()
        before = _claims(run)
        log = _Reading(run, fresh).read()
        if _claims(run) == before:
            findings.all.extend(fresh.all)
            return log
    raise RunBusyError(
        f"incarnations began or ended during each of {ATTEMPTS} readings of the log",
        where=str(run),
        way_out="audit again when the run has settled",
    )


def _claims(run: Path) -> list[Path]:
    return sorted([*(run / "incarnations").glob("*.json"), *(run / "seals").glob("*.json")])


class _Reading:
    """One reading: control before payload, so that every reference can be followed."""

    def __init__(self, run: Path, findings: Findings) -> None:
        self._run = run
        self._findings = findings

    def read(self) -> RunLog:
        run_id, has_recipe = self._identity()
        claimed = self._numbered("incarnations", run_id)
        seals = self._numbered("seals", run_id)
        control = self._segments("control")
        payload = self._segments("payload")
        self._check_claims(claimed, seals, {*control, *payload})
        both: tuple[tuple[StreamName, dict[int, dict[int, Segment]]], ...]
        both = (("control", control), ("payload", payload))
        incarnations: dict[int, IncarnationLog] = {}
        for number in sorted({*control, *payload, *seals}):
            seal = self._seal(number, seals[number], claimed) if seals.get(number) else None
            streams = [
                StreamReader(
                    segments.get(number, {}),
                    run_id=run_id,
                    incarnation=number,
                    stream=stream,
                    seal=None if seal is None else seal[stream],
                    findings=self._findings,
                ).read()
                for stream, segments in both
            ]
            log = IncarnationLog(*streams)
            self._check_counts(number, log, sealed=seal is not None)
            incarnations[number] = log
        return RunLog(run_id, incarnations, len(claimed), len(seals), has_recipe=has_recipe)

    def _identity(self) -> tuple[str, bool]:
        """The run's id, and whether a recipe made it."""
        path = self._run / "run.json"
        rest = (self._run / name for name in ("log", "incarnations"))
        if not path.exists() and not any(folder.exists() for folder in rest):
            raise NothingToResumeError(
                "no run here", where=str(self._run), way_out="name the directory of a run"
            )
        value = read_sealed(path, self._findings, where="run.json", names=_RUN_NAMES)
        return ("", True) if value is None else (str(value["run_id"]), bool(value["config_digest"]))

    def _numbered(self, folder: str, run_id: str) -> dict[int, dict[str, Any]]:
        """Sealed JSON files named by incarnation; a damaged one stands as an empty object."""
        found: dict[int, dict[str, Any]] = {}
        for path in sorted((self._run / folder).glob("*.json")):
            match = _NUMBERED_NAME.fullmatch(path.name)
            if match is None:
                continue
            number, where = int(match[1]), f"{folder}/{path.name}"
            value = read_sealed(path, self._findings, where=where, names=_NAMES[folder])
            found[number] = value or {}
            if value is not None and (value.get("run_id"), value.get("incarnation")) != (
                run_id,
                number,
            ):
                self._findings.damage(
                    where, "it belongs to another incarnation or run", _ORDER_RULE
                )
        return found

    def _segments(self, stream: StreamName) -> dict[int, dict[int, Segment]]:
        return {
            incarnation: {
                number: read_segment(path, stream, incarnation=incarnation, number=number)
                for number, path in paths.items()
            }
            for incarnation, paths in self._paths(stream).items()
        }

    def _paths(self, stream: StreamName) -> SegmentPaths:
        paths: SegmentPaths = {}
        for path in sorted((self._run / "log").glob(f"{stream}-*.plog")):
            match = _SEGMENT_NAME.fullmatch(path.name)
            if match is not None:
                paths.setdefault(int(match[2]), {})[int(match[3])] = path
        return paths

    def _check_claims(
        self, claimed: Mapping[int, object], seals: Mapping[int, object], written: set[int]
    ) -> None:
        highest = max((*claimed, *seals, *written), default=0)
        for number in _missing(highest, claimed):
            self._findings.damage(f"incarnations/{number}.json", "the file is missing", _ORDER_RULE)
        for number in _missing(max(written, default=1) - 1, seals):
            self._findings.damage(f"seals/{number}.json", "the seal is missing", _ORDER_RULE)

    def _seal(
        self, number: int, value: Mapping[str, Any], claimed: Mapping[int, object]
    ) -> dict[StreamName, dict[int, SealedSegment]]:
        where, sealed_by = f"seals/{number}.json", value["sealed_by"]
        if sealed_by not in claimed or sealed_by < number:
            self._findings.damage(where, f"sealed by {sealed_by}", _ORDER_RULE)
        sealed: dict[StreamName, dict[int, SealedSegment]] = {"control": {}, "payload": {}}
        for name, entry in value["segments"].items():
            match = _SEGMENT_NAME.fullmatch(name)
            if match is None or int(match[2]) != number:
                rule = "a seal lists segments of its own incarnation"
                self._findings.damage(where, f"it lists {name}", rule)
                continue
            stream: StreamName = "control" if match[1] == "control" else "payload"
            sealed[stream][int(match[3])] = SealedSegment(
                entry["valid_end"], entry["records"], entry["checksum"]
            )
        return sealed

    def _check_counts(self, number: int, log: IncarnationLog, *, sealed: bool) -> None:
        """Neither stream has fewer records than the other has seen durable."""
        if log.payload.count < log.control.other_durable:
            self._findings.damage(
                f"log/payload-{number:06d}",
                f"{log.payload.count} records of {log.control.other_durable} durable ones",
                "the other stream names how many records were durable",
            )
        needed = log.payload.other_durable
        # A live writer may have gone on in control since it was read.
        later = 0 if sealed or log.control.count >= needed else self._control_records(number)
        if max(log.control.count, later) < needed:
            self._findings.damage(
                f"log/control-{number:06d}",
                f"{log.control.count} records of {needed} durable ones",
                "the other stream names how many records were durable",
            )

    def _control_records(self, number: int) -> int:
        """Records of complete batches in the control stream as it is now."""
        paths = self._paths("control").get(number, {})
        ends = [
            read_segment(path, "control", incarnation=number, number=segment).records[-1:]
            for segment, path in paths.items()
        ]
        return max((records[0].lsn + 1 for records in ends if records), default=0)


def _missing(highest: int, present: Container[int]) -> list[int]:
    """The first numbers from 1 to ``highest`` that are not there; a stray name may be huge."""
    absent = (number for number in range(1, highest + 1) if number not in present)
    return list(islice(absent, _SHOWN_MISSING))
