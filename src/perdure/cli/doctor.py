"""``perdure doctor``: is this machine fit for a run, before there is one?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.output import JsonOption, print_json
from perdure.core.cores import usable_cores
from perdure.core.errors import ConfigError, DamagedError, NothingToResumeError, StorageError

if TYPE_CHECKING:
    from perdure.checkpoint import Manifest
    from perdure.storage.probe import Finding

DOCTOR_EXAMPLES = (
    "Examples:\n\nperdure doctor\n\nperdure doctor runs/tiny-1\n\n"
    "perdure doctor scratch/runs --state-gib 12 --keep 3\n\nperdure doctor --remote s3://bucket/x"
)
EXTRAS = ("transformers", "reasoning-gym", "obstore", "tensorboard", "ray")
"""What some commands and recipes need."""
WRITE_BYTES = 64 << 20
KEEP = 2
CLUSTER_TIMEOUT_S = 3.0
_GIB = 2**30


def doctor(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where runs go, or a run; need not exist yet.")
    ] = Path("runs"),
    *,
    state_gib: Annotated[
        float | None,
        typer.Option(
            "--state-gib",
            min=0.0,
            metavar="GIB",
            help="Size of a checkpoint; for Adam in float32, 12 bytes a parameter.",
        ),
    ] = None,
    arenas: Annotated[
        int,
        typer.Option("--arenas", min=1, max=2, metavar="N", help="As checkpoint.arenas will be."),
    ] = 2,
    keep: Annotated[
        int, typer.Option("--keep", min=1, metavar="N", help="Checkpoints that will be kept.")
    ] = KEEP,
    remote: Annotated[
        str | None,
        typer.Option("--remote", metavar="URL", help="As checkpoint.remote will be; tried too."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check the disk (fsync, rename, link, locks, O_DIRECT, rate), space, memory and versions.

    A little is written to DIR, or to the nearest directory above it, and to --remote, and removed
    again. What a checkpoint needs is taken from the run at DIR, or from --state-gib.
    """
    from perdure.core.clock import SystemClock
    from perdure.storage.probe import probe_directory

    there = _nearest(directory)
    findings = probe_directory(there, clock=SystemClock(), write_bytes=WRITE_BYTES)
    findings += _needs(directory, there, state_gib=state_gib, arenas=arenas, keep=keep)
    findings += _machine()
    findings += _remote(remote)
    findings += _cluster()
    failed = [finding for finding in findings if finding.grade == "failed"]
    if json:
        rows = [asdict(finding) for finding in findings]
        print_json({"directory": str(there), "ok": not failed, "findings": rows})
    else:
        typer.echo(f"checked {there}")
        for finding in findings:
            typer.echo(f"{finding.grade:<8} {finding.name:<13} {finding.text}")
    if failed:
        raise StorageError(
            f"{len(failed)} of {len(findings)} checks failed:"
            f" {', '.join(finding.name for finding in failed)}",
            where=str(there),
            rule="a run keeps its promises only where these hold",
            way_out="what each of them says; for the disk and the store, another place, a smaller"
            " model, or other rights",
        )


def _remote(url: str | None) -> list[Finding]:
    """Rights and conditions of the remote tier, if one is named."""
    if url is None:
        return []
    from perdure.checkpoint.tier import open_objects, probe_objects
    from perdure.core.clock import SystemClock

    return probe_objects(open_objects(url), clock=SystemClock())


def _cluster() -> Iterator[Finding]:
    """Whether the head answers that runs with ``runtime: ray`` would join."""
    from perdure.storage.probe import Finding
    from perdure.trainers.ray_config import RAY_ADDRESS, RayConfig

    if _version("ray") is None:
        return
    try:
        address = RayConfig().head()
    except ConfigError as error:
        yield Finding("ray", "failed", str(error))
        return
    if address is None:
        text = f"{RAY_ADDRESS} is not set: runtime=ray takes ray.address, or a cluster of its own"
        yield Finding("ray", "ok", text)
        return
    from perdure.runtime.ray.head import answers

    if answers(address, timeout_s=CLUSTER_TIMEOUT_S):
        yield Finding("ray", "ok", f"the head at {address} answers")
        return
    text = (
        f"nobody answers at {address}, which {RAY_ADDRESS} names: start a head with"
        f" `ray start --head`, unset {RAY_ADDRESS}, or have recipes say ray.address=HOST:PORT"
    )
    yield Finding("ray", "failed", text)


def _nearest(directory: Path) -> Path:
    """The directory itself or the nearest one above it that exists."""
    path = directory.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _needs(
    directory: Path, there: Path, *, state_gib: float | None, arenas: int, keep: int
) -> Iterator[Finding]:
    """Free space and memory, beside what saving will take of them."""
    from perdure.storage.probe import Finding
    from perdure.trainers.memory import machine_memory

    memory, free = machine_memory(), shutil.disk_usage(there).free
    manifest = None if state_gib is not None else _newest_manifest(directory)
    if manifest is not None:
        on_disk, staged = manifest.bytes, manifest.arenas * manifest.arena_bytes
        of = f"{_arenas(manifest.arenas)}, as in {manifest.name.directory}"
    elif state_gib is not None:
        on_disk = int(state_gib * _GIB)
        staged, of = arenas * on_disk, _arenas(arenas)
    else:
        yield Finding("space", "ok", f"{free / _GIB:.1f} GiB free")
        yield Finding("memory", "ok", f"{memory.available / _GIB:.1f} GiB available")
        return
    # One more than are kept: the older goes only when the newer is committed.
    needed = (keep + 1) * on_disk
    text = f"{needed / _GIB:.2f} GiB for {keep + 1} checkpoints, {free / _GIB:.1f} GiB free"
    yield Finding("space", "ok" if needed <= free else "failed", text)
    text = (
        f"{staged / _GIB:.2f} GiB for staging ({of}), {memory.available / _GIB:.1f} of"
        f" {memory.total / _GIB:.1f} GiB available"
    )
    grade = "ok" if staged <= memory.available else "warning"
    yield Finding("memory", "failed" if staged > memory.total else grade, text)


def _arenas(count: int) -> str:
    return "one arena" if count == 1 else "two arenas"


def _newest_manifest(directory: Path) -> Manifest | None:
    """That of the newest committed checkpoint, if the directory is a run that has one."""
    from perdure.checkpoint import committed_manifest
    from perdure.cli.checkpoints import committed_checkpoints
    from perdure.storage import PosixStorage

    storage = PosixStorage(directory)
    try:
        records = committed_checkpoints(storage)
        return committed_manifest(storage, records[-1]) if records else None
    except (NothingToResumeError, DamagedError):
        # Whether a run is whole is for `ckpt verify` and `audit` to say.
        return None


def _machine() -> Iterator[Finding]:
    """Versions, threads, and what is installed beside the necessary."""
    from perdure.checkpoint.snapshot import library_versions
    from perdure.storage.probe import Finding

    versions = library_versions()
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Finding("versions", "ok", text)
    cores, asked = usable_cores(), os.environ.get("OMP_NUM_THREADS")
    text = f"{cores} cores for this process, OMP_NUM_THREADS {asked or 'not set'}"
    many = asked is not None and asked.isdecimal() and int(asked) > cores
    yield Finding("threads", "warning" if many else "ok", text)
    found = {name: _version(name) for name in EXTRAS}
    text = ", ".join(f"{name} {version or 'absent'}" for name, version in found.items())
    yield Finding("extras", "ok", text)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
