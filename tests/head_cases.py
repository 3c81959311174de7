"""Pointers of a remote tier, as ``tests/golden/remote-v1`` holds them: every field they have."""

from __future__ import annotations

from dataclasses import replace

from perdure.checkpoint.tier import Head, RemoteCheckpoint, RemoteFile
from perdure.core.ids import IncarnationNumber

CHECKSUM = "0123456789abcdef0123456789abcdef"

HEAD = Head(
    run_id="5" * 32,
    incarnation=IncarnationNumber(3),
    claim="c" * 32,
    sequence=17,
    written_wall_s=1_800_000_100.5,
    shipped_wall_s=1_800_000_099.25,
    checkpoints=(
        RemoteCheckpoint("step-00000020-1", 20, "a" * 32, 4096, 16_777_216),
        RemoteCheckpoint("step-00000040-3", 40, "b" * 32, 70_000_000_000, 8_388_608),
    ),
    uploading="step-00000060-3",
    uploading_segments=("segments/agents/1/replay/000000000000-5-1-x.seg",),
    dropped=("step-00000010-1", "segments/replay/000000000005-2-1-y.seg"),
    files={
        "run.json": RemoteFile(f"files/{CHECKSUM}/run.json", 312, CHECKSUM),
        "incarnations/3.json": RemoteFile("files/d/incarnations/3.json", 98, "d" * 32),
    },
    log={"control-000001-000000.plog": 1234, "payload-000003-000000.plog": 67_108_864},
)

HEAD_CUT_OTHERWISE = replace(
    HEAD,
    checkpoints=(
        HEAD.checkpoints[0],
        replace(
            HEAD.checkpoints[1],
            segment_piece_bytes={"segments/replay/000000000010-5-1-z.seg": 16_777_216},
        ),
    ),
)
"""Its newest checkpoint names a segment that was stored before, in pieces of another size."""

HEADS = {"head.json": HEAD, "head-cut-otherwise.json": HEAD_CUT_OTHERWISE}
"""Golden file → what it says."""
