"""A tiny writer of run directories, made from the format pages alone, for the audit's tests.

It shares no code with the production writer: what both this writer and that one write must audit
clean. Every record is a batch of its own unless ``last=False``.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

RUN_ID = "0123456789abcdef" * 2
HEADER = struct.Struct("<4sHHIIIIQQQQQ")

TYPES = {
    "started": 2,
    "submitted": 3,
    "sessions_done": 4,
    "settled": 5,
    "partials": 6,
    "tool_result": 7,
    "taken": 8,
    "step_done": 9,
    "redone": 10,
    "published": 11,
    "evicted": 12,
    "refilled": 13,
    "checkpointed": 14,
    "collect": 15,
    "evaluated": 16,
    "phase_step": 17,
    "update_failed": 18,
    "closed": 19,
    "session_restarted": 20,
}


@dataclass
class Rec:
    """A control record to write; with ``arrays``, its payload record goes first."""

    name: str
    fields: dict[str, Any]
    key: str
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    payload: dict[str, Any] = field(default_factory=dict)
    payload_type: int = 101
    payload_key: str = ""


def sealed(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**value, "digest": xxhash.xxh3_128_hexdigest(text.encode())}).encode()


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


def encode(
    type_: int,
    *,
    key: str,
    fields: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray] | None = None,
    header: Mapping[str, int],
) -> bytes:
    """One record; ``header``: incarnation, lsn, durable_upto, other, flags, version."""
    blobs = {name: array.tobytes() for name, array in (arrays or {}).items()}
    fields = dict(fields)
    body = b""
    for _ in range(3):  # the offsets depend on the length of the fields that name them
        if arrays:
            body = padded(bytes(64) + msgpack.packb(fields))
            fields["arrays"] = fields.get("arrays_as") or _layout(arrays, len(body))
    packed = msgpack.packb(fields)
    body = padded(bytes(64) + packed)
    body += b"".join(padded(blob) for blob in blobs.values())
    head = [
        b"PLOG",
        header.get("version", 1),
        type_,
        len(body) // 64,
        len(packed),
        header["incarnation"],
        header["flags"],
        header["lsn"],
        header["durable_upto"],
        header["other"],
        xxhash.xxh3_64_intdigest(key.encode()),
    ]
    zeroed = HEADER.pack(*head, 0) + body[64:]
    return HEADER.pack(*head, xxhash.xxh3_64_intdigest(zeroed)) + body[64:]


def _layout(arrays: Mapping[str, np.ndarray], start: int) -> list[list[Any]]:
    entries, offset = [], start
    for name, array in arrays.items():
        entries.append([name, array.dtype.str, list(array.shape), offset, array.nbytes])
        offset += array.nbytes + -array.nbytes % 64
    return entries


def claimed(number: int) -> dict[str, Any]:
    """What an incarnation file says."""
    claim = {"host": "hö", "pid": 7, "started_wall_s": 2.5, "took_over": False}
    return {"format": 1, "run_id": RUN_ID, "incarnation": number} | claim


class Stream:
    """One stream of an incarnation; ``segments`` are the bytes of its files."""

    def __init__(self, run: Run, name: str, incarnation: int) -> None:
        self.run = run
        self.name = name
        self.incarnation = incarnation
        self.segments: list[bytearray] = []
        self.lsn = 0
        self.other: Stream | None = None

    def open(self, *, previous: int | None = None, length: int | None = None) -> None:
        """Begin the next segment, which continues from the one before unless told otherwise."""
        number = len(self.segments)
        previous = number - 1 if previous is None else previous
        data = bytes(self.segments[previous]) if previous >= 0 else b""
        data = data if length is None else data[:length]
        self.segments.append(bytearray())
        fields = {
            "run_id": self.run.run_id,
            "incarnation": self.incarnation,
            "stream": self.name,
            "segment": number,
            "previous_segment": previous,
            "previous_length": len(data),
            "previous_checksum": xxhash.xxh3_64_intdigest(data) if data else 0,
        }
        self.append(1, key=f"segment/{self.incarnation}/{self.name}/{number}", fields=fields)

    def append(
        self,
        type_: int,
        *,
        key: str,
        fields: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        **header: int,
    ) -> list[int]:
        """Write one record; returns it as a payload reference."""
        data = self.segments[-1]
        offset = len(data)
        defaults = {
            "incarnation": self.incarnation,
            "lsn": self.lsn,
            "durable_upto": offset,
            "other": self.other.lsn if self.other else 0,
            "flags": 1,
        }
        record = encode(type_, key=key, fields=fields, arrays=arrays, header=defaults | header)
        data += record
        self.lsn += 1
        checksum = int.from_bytes(record[56:64], "little")
        return [self.incarnation, len(self.segments) - 1, offset, len(record), checksum]

    def file(self, number: int) -> str:
        return f"{self.name}-{self.incarnation:06d}-{number:06d}.plog"


class Incarnation:
    """Writer of one incarnation."""

    def __init__(self, run: Run, number: int, *, parent: int, **started: Any) -> None:
        self.run = run
        self.number = number
        self.control = Stream(run, "control", number)
        self.payload = Stream(run, "payload", number)
        self.control.other, self.payload.other = self.payload, self.control
        self.payload.open()
        self.control.open()
        fields = {
            "incarnation": number,
            "parent": parent,
            "base_checkpoint": "",
            "base_position": None,
            "redo_until": None,
            "config_digest": "c",
        }
        self.write(Rec("started", fields | started, f"incarnation/{number}"))

    @property
    def end(self) -> list[int]:
        """Position of the end of the control log."""
        segments = self.control.segments
        return [self.number, len(segments) - 1, len(segments[-1])]

    def write(self, record: Rec, **header: int) -> list[int]:
        """Write a record, its payload first; returns the position of its end."""
        fields = dict(record.fields)
        if record.arrays:
            fields["payload"] = self.payload.append(
                record.payload_type,
                key=record.payload_key,
                fields=record.payload,
                arrays=record.arrays,
            )
        if record.name == "checkpointed":
            fields = self.run.commit(fields, self.end)
        self.control.append(TYPES[record.name], key=record.key, fields=fields, **header)
        return self.end

    def write_all(self, records: Sequence[Rec]) -> None:
        for record in records:
            self.write(record)

    def seal(self, by: int) -> None:
        """Seal both streams where they end now."""
        self.run.seals[self.number] = {
            "format": 1,
            "run_id": self.run.run_id,
            "incarnation": self.number,
            "sealed_by": by,
            "segments": {
                stream.file(number): {
                    "valid_end": len(data),
                    "records": _records(data),
                    "checksum": f"{xxhash.xxh3_64_intdigest(bytes(data)):016x}",
                }
                for stream in (self.control, self.payload)
                for number, data in enumerate(stream.segments)
            },
        }


def _records(data: bytes) -> int:
    count = offset = 0
    while offset < len(data):
        offset += 64 * HEADER.unpack_from(data, offset)[3]
        count += 1
    return count


class Run:
    """A run directory in memory until :meth:`save`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = RUN_ID
        self.incarnations: dict[int, Incarnation] = {}
        self.seals: dict[int, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}

    def incarnation(self, number: int, *, parent: int | None = None, **started: Any) -> Incarnation:
        """Begin incarnation ``number``; the one before is sealed by it."""
        before = max(self.incarnations, default=0)
        if before and before not in self.seals:
            self.incarnations[before].seal(number)
        parent = before if parent is None else parent
        self.incarnations[number] = Incarnation(self, number, parent=parent, **started)
        return self.incarnations[number]

    def checkpoint(
        self,
        directory: str,
        *,
        position: Sequence[int] | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> Rec:
        """A record that commits a checkpoint; its files are made when the record is written."""
        return Rec(
            "checkpointed",
            {"directory": directory, "position": position, "manifest": dict(manifest or {})},
            f"checkpointed/{directory}",
        )

    def commit(self, fields: Mapping[str, Any], end: Sequence[int]) -> dict[str, Any]:
        """Make the files of a checkpoint; returns the fields of its record."""
        directory = fields["directory"]
        kind, step, incarnation = directory.split("-")
        phase = "train" if kind == "step" else "warm"
        position = list(fields["position"] or end)
        data = {"model/policy.safetensors": b"m" * 100, "state.msgpack": b"s"}
        manifest = {
            "format": 1,
            "features": [],
            "name": {"phase": phase, "step": int(step), "incarnation": int(incarnation)},
            "position": position,
            "files": {
                name: {"bytes": len(blob), "xxh3_128": xxhash.xxh3_128_hexdigest(blob)}
                for name, blob in data.items()
            },
        }
        data["manifest.json"] = sealed(manifest | fields["manifest"])
        for name, blob in data.items():
            self.files[f"checkpoints/{directory}/{name}"] = blob
        return {
            "directory": directory,
            "phase": phase,
            "step": int(step),
            "manifest_digest": xxhash.xxh3_128_hexdigest(data["manifest.json"]),
            "position": position,
        }

    def metrics(self, rows: Sequence[tuple[int, str]], file: str = "steps.jsonl") -> None:
        lines = [json.dumps({"global_step": s, "digest": d, "metrics": {}}) for s, d in rows]
        self.files[f"metrics/{file}"] = "".join(f"{line}\n" for line in lines).encode()

    def save(self) -> Path:
        """Write everything; returns the run directory."""
        files = dict(self.files)
        about = {"versions": {}, "config_digest": "c", "dataset_digest": "d"}
        about |= {"format": 1, "run_id": self.run_id, "created_wall_s": 1.5}
        files["run.json"] = sealed(about)
        for number, incarnation in self.incarnations.items():
            files[f"incarnations/{number}.json"] = sealed(claimed(number))
            for stream in (incarnation.control, incarnation.payload):
                for segment, data in enumerate(stream.segments):
                    files[f"log/{stream.file(segment)}"] = bytes(data)
        for number, seal in self.seals.items():
            files[f"seals/{number}.json"] = sealed(seal)
        for name, data in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.path


def submitted(group: int, **changes: Any) -> Rec:
    fields = {
        "group": group,
        "submitted_step": 1,
        "sessions": 2,
        "prompt_ids": [1, 2, group],
        "task": "sort",
        "answer": str(group),
        "dataset_digest": "d",
        "data_index": group,
    }
    return Rec("submitted", fields | changes, f"submitted/{group}")


def session_done(
    group: int,
    index: int,
    *,
    version: int = 0,
    arrays: Mapping[str, np.ndarray] | None = None,
    payload: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Rec:
    """A SessionsDone of one row; ``changes`` and ``payload`` are whole columns."""
    length = 3 + index
    fields = {
        "sessions": [[group, index]],
        "rewards": [0.5 * index],
        "stop_reasons": ["stop"],
        "tokens": [length],
        "first_versions": [version],
        "last_versions": [version],
        "parts": [{"correct": 1.0}],
    }
    trajectory = {
        "prompt_ids": np.array([1, 2, group], "<i4"),
        "response_ids": np.arange(length, dtype="<i4") + 10 * group,
        "logprobs": np.full(length, -0.25, "<f4"),
        "loss_mask": np.ones(length, "|u1"),
    }
    about = {
        "sessions": [[group, index]],
        "prompt_tokens": [3],
        "response_tokens": [length],
        "segments": [[[version, 0, length]]],
        "stop_reasons": ["stop"],
    }
    return Rec(
        "sessions_done",
        fields | changes,
        f"sessions_done/g{group}.s{index}",
        arrays=trajectory | dict(arrays or {}),
        payload=about | dict(payload or {}),
        payload_key=f"trajectories/g{group}.s{index}",
    )


def packed(*records: Rec) -> Rec:
    """One record with the rows of these, all SessionsDone or all Partials, in this order."""
    first = records[0]
    return Rec(
        first.name,
        {name: [x for r in records for x in r.fields[name]] for name in first.fields},
        first.key,
        arrays={name: np.concatenate([r.arrays[name] for r in records]) for name in first.arrays},
        payload={name: [x for r in records for x in r.payload[name]] for name in first.payload},
        payload_type=first.payload_type,
        payload_key=first.payload_key,
    )


def pack(records: Sequence[Rec]) -> list[Rec]:
    """The records, with one SessionsDone in place of each row of them."""
    done: list[Rec] = []
    for name, group in itertools.groupby(records, key=lambda record: record.name):
        together = list(group)
        done += [packed(*together)] if name == "sessions_done" else together
    return done


def settled(group: int, outcome: str = "finished") -> Rec:
    fields = {"group": group, "outcome": outcome, "reason": ""}
    return Rec("settled", fields, f"group_settled/{group}")


def taken(step: int, local: int, groups: list[int]) -> Rec:
    fields = {
        "update": [step, local],
        "groups": groups,
        "config_digest": "c",
        "reference_digest": "",
        "tokenizer_digest": "t",
    }
    return Rec("taken", fields, f"taken/u{step}.{local}")


def step_done(step: int, **changes: Any) -> Rec:
    fields = {
        "global_step": step,
        "digest": f"state-{step}",
        "policy_digest": f"policy-{step}",
        "optimizer_step": 2 * step,
        "metrics": {"reward": 0.5, "loss": float("nan")},
        "timings_s": {"update": 0.1},
        "skipped": [],
    }
    return Rec("step_done", fields | changes, f"step_done/{step}")


def redone(
    step: int, *, incarnation: int, digest: str = "", equal: bool = True, **changes: Any
) -> Rec:
    fields = {
        "global_step": step,
        "digest": digest or f"state-{step}",
        "equal": equal,
        "incarnation": incarnation,
        "metrics": {"reward": 0.5},
        "timings_s": {"update": 0.1},
    }
    return Rec("redone", fields | changes, f"redone/{step}/{incarnation}")


def published(version: int, *, step: int, digest: str = "") -> Rec:
    fields = {"version": version, "digest": digest or f"policy-{step}", "global_step": step}
    return Rec("published", fields, f"published/{version}")


def evaluated(step: int, *, digest: str = "", **metrics: float) -> Rec:
    digest = digest or f"policy-{step}"
    fields = {
        "global_step": step,
        "digest": digest,
        "metrics": {"accuracy": 0.5} | metrics,
        "timings_s": {"validation": 0.1},
    }
    return Rec("evaluated", fields, f"evaluated/{step}/{digest}")


def phase_step(step: int, *, final: bool = False, **changes: Any) -> Rec:
    fields = {
        "phase": "warm_start",
        "step": step,
        "digest": f"warm-{step}",
        "metrics": {"loss": 1.0},
        "timings_s": {},
        "final": final,
    }
    return Rec("phase_step", fields | changes, f"phase_step/warm_start/{step}")


def evicted(group: int, reason: str = "age") -> Rec:
    fields = {"group": group, "reason": reason, "global_step": 1}
    return Rec("evicted", fields, f"evicted/{group}")


def refilled(group: int, replaces: int) -> Rec:
    return Rec("refilled", {"group": group, "replaces": replaces}, f"refilled/{replaces}")


def update_failed(step: int, local: int, *, incarnation: int) -> Rec:
    fields = {"update": [step, local], "incarnation": incarnation, "error": "boom"}
    return Rec("update_failed", fields, f"update_failed/u{step}.{local}/{incarnation}")


def collect(*directories: str) -> Rec:
    return Rec("collect", {"directories": list(directories)}, f"collect/{','.join(directories)}")


def closed(incarnation: int) -> Rec:
    fields = {"incarnation": incarnation, "reason": "finished"}
    return Rec("closed", fields, f"closed/{incarnation}")


def finished_group(group: int, *, version: int = 0) -> list[Rec]:
    """A group from its submission to its end."""
    sessions = [session_done(group, index, version=version) for index in (0, 1)]
    return [submitted(group), *sessions, settled(group)]


def first_step(run: Run) -> list[Rec]:
    """Warm start, checkpoint 0, and a global step of two local updates of one group each."""
    return [
        phase_step(4),
        phase_step(8, final=True),
        run.checkpoint("warm-00000008-1"),
        run.checkpoint("step-00000000-1"),
        published(0, step=0),
        evaluated(0),
        submitted(0),
        submitted(1),
        *(session_done(group, index) for index in (0, 1) for group in (0, 1)),
        settled(0),
        settled(1),
        taken(1, 0, [0]),
        taken(1, 1, [1]),
        step_done(1),
        run.checkpoint("step-00000001-1"),
        published(1, step=1),
        evaluated(1),
    ]


def second_step(*, incarnation: int) -> list[Rec]:
    """A redo of the first step, and another one."""
    return [
        redone(1, incarnation=incarnation),
        *finished_group(2, version=1),
        *finished_group(3, version=1),
        taken(2, 0, [2]),
        taken(2, 1, [3]),
        step_done(2),
        published(2, step=2),
    ]


def healthy(path: Path, edit: Callable[[list[Rec]], None] | None = None) -> Run:
    """A run of two incarnations without a fault; ``edit`` may change the second one's records.

    Sessions of several groups share a record in the first one, in the second one each has its own.
    """
    run = Run(path)
    run.incarnation(1).write_all(pack(first_step(run)))
    second = run.incarnation(2, base_checkpoint="step-00000001-1")
    records = second_step(incarnation=2)
    if edit is not None:
        edit(records)
    second.write_all(records)
    run.metrics([(1, "state-1"), (2, "state-2")])
    run.metrics([(0, "policy-0"), (1, "policy-1")], "evaluations.jsonl")
    return run


def plain(path: Path, records: Callable[[Run], Sequence[Rec]]) -> Path:
    """A saved run of one incarnation with these records."""
    run = Run(path)
    run.incarnation(1).write_all(records(run))
    return run.save()
