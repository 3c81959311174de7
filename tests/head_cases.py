"""The pointer of a remote tier, with every field it has, as ``tests/golden/remote-v1`` holds it."""

from __future__ import annotations

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
