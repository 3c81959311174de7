"""An upload compares what comes back with what the manifest says, and blames the right side."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from tier_cases import OPTIONS, BreakingObjects, TieredRun, memory_objects

from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.manifest import Manifest, decode_manifest
from perdure.checkpoint.tier import ObjectStore, RemoteUnavailableError
from perdure.checkpoint.tier.local_pieces import LocalPieces
from perdure.checkpoint.tier.pieces import in_order
from perdure.checkpoint.tier.upload import Upload
from perdure.core.errors import DamagedError
from perdure.core.faults import NoFaults
from perdure.storage import MemoryStorage

MODEL = "model/policy.safetensors"
PIECE = OPTIONS.piece_bytes


@pytest.fixture
def executor() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as running:
        yield running


@dataclasses.dataclass
class Saved:
    """A checkpoint whose manifest has checksums of every ``chunk_bytes`` of the model."""

    chunk_bytes: int
    storage: MemoryStorage = dataclasses.field(default_factory=MemoryStorage)

    def __post_init__(self) -> None:
        run = TieredRun(self.storage)
        name = run.train_and_save()
        run.close()
        self.root = f"checkpoints/{name}"
        self.path = f"{self.root}/{MODEL}"
        manifest = decode_manifest(self.storage.read(f"{self.root}/manifest.json"), where="m")
        model = self.storage.read(self.path)
        starts = range(0, len(model), self.chunk_bytes)
        sums = [xxhash.xxh3_128_hexdigest(model[i : i + self.chunk_bytes]) for i in starts]
        entry = FileEntry(len(model), self.chunk_bytes, tuple(sums))
        self.manifest: Manifest = dataclasses.replace(
            manifest, files={**manifest.files, MODEL: entry}
        )

    def upload(self, objects: ObjectStore, executor: ThreadPoolExecutor) -> None:
        local = LocalPieces(self.storage, piece_bytes=PIECE, ahead=2)
        upload = Upload(self.storage, local, objects, OPTIONS, executor, NoFaults(), lambda: None)
        upload.run(self.manifest, self.manifest.encode(), shared=())

    def damage(self) -> None:
        data = bytearray(self.storage.read(self.path))
        data[-1] ^= 1
        self.storage.damage(self.path, bytes(data))


CHUNKS = [PIECE, PIECE // 2, PIECE - 1, 3 * PIECE]


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_what_is_stored_wrong_is_stored_again(
    chunk_bytes: int, executor: ThreadPoolExecutor
) -> None:
    saved, objects = Saved(chunk_bytes), memory_objects()
    saved.upload(objects, executor)
    keys = sorted(objects.list(saved.path))
    assert len(keys) > 2
    assert b"".join(objects.read(key) for key in keys) == saved.storage.read(saved.path)
    objects.delete([f"{saved.root}/manifest.json"])
    objects.overwrite(keys[1], bytes(PIECE))
    objects.delete([keys[2]])
    saved.upload(objects, executor)
    assert b"".join(objects.read(key) for key in keys) == saved.storage.read(saved.path)


def test_a_request_that_hangs_is_a_store_that_does_not_answer(
    executor: ThreadPoolExecutor,
) -> None:
    answers = threading.Event()

    def hang() -> int:
        assert answers.wait(20)
        return 2

    results = in_order(executor, [lambda: 1, hang], ahead=2, timeout_s=0.05)
    assert next(results) == 1
    with pytest.raises(RemoteUnavailableError, match=r"has not ended for 0\.05 s"):
        next(results)
    answers.set()


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_damage_here_is_not_called_damage_there(
    chunk_bytes: int, executor: ThreadPoolExecutor
) -> None:
    saved, objects = Saved(chunk_bytes), memory_objects()
    saved.damage()
    with pytest.raises(DamagedError, match="is not what was committed"):
        saved.upload(objects, executor)
    assert f"{saved.root}/manifest.json" not in objects.list(saved.root)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a_store_that_never_keeps_what_it_gets_is_named(
    chunk_bytes: int, executor: ThreadPoolExecutor
) -> None:
    class Forgetful(BreakingObjects):
        def fingerprint(self, key: str, *, chunk_bytes: int) -> tuple[int, tuple[str, ...]]:
            size, sums = super().fingerprint(key, chunk_bytes=chunk_bytes)
            return size, ("0" * 32,) * len(sums) if MODEL in key else sums

    saved = Saved(chunk_bytes)
    with pytest.raises(RemoteUnavailableError, match="differently"):
        saved.upload(Forgetful(memory_objects()), executor)
