"""Object stores behind obstore: S3 and everything that speaks its API, and one in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import ObjectStore as AnyStore
from obstore.store import S3Store

from perdure.checkpoint.tier.local_objects import open_local
from perdure.checkpoint.tier.objects import Bytes, ObjectStore, RemoteUnavailableError, chunk_sums
from perdure.core.errors import ConfigError, StorageError

_CHUNK_BYTES = 256 << 10
_LIST_CHUNK = 1000
_DELETE_CHUNK = 1000
_RIGHTS = "the tier lists, reads, writes and deletes objects below its prefix"


@dataclass(frozen=True, slots=True)
class ObstoreObjects:
    """An :class:`~perdure.checkpoint.tier.ObjectStore` over any store of obstore's that can replace
    an object conditionally.
    """

    store: AnyStore

    def create(self, key: str, data: Bytes) -> bool:
        with _translating(key):
            try:
                obstore.put(self.store, key, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def overwrite(self, key: str, data: Bytes) -> None:
        with _translating(key):
            obstore.put(self.store, key, data, mode="overwrite", use_multipart=False)

    def swap(self, key: str, data: Bytes, *, expected: str | None) -> str | None:
        with _translating(key):
            try:
                if expected is None:
                    result = obstore.put(self.store, key, data, mode="create")
                else:
                    # The version is left out: S3 stores without versioning have none.
                    mode: Any = {"e_tag": expected}
                    result = obstore.put(self.store, key, data, mode=mode)
            except (AlreadyExistsError, PreconditionError):
                return None
        return _tag(key, result["e_tag"])

    def read(self, key: str) -> bytes:
        return self.read_tagged(key)[0]

    def read_into(self, key: str, out: memoryview) -> bool:
        position = 0
        for chunk in self._chunks(key):
            end = position + len(chunk)
            if end > len(out):
                return False
            out[position:end] = chunk
            position = end
        return position == len(out)

    def fingerprint(self, key: str, *, chunk_bytes: int) -> tuple[int, tuple[str, ...]]:
        return chunk_sums(self._chunks(key), chunk_bytes)

    def _chunks(self, key: str) -> Generator[memoryview]:
        # Small ones stay in the processor's cache: whole objects cost three times the CPU.
        with _translating(key):
            for chunk in obstore.get(self.store, key).stream(min_chunk_size=_CHUNK_BYTES):
                yield memoryview(chunk)

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        with _translating(key):
            found = obstore.get(self.store, key)
            return bytes(found.bytes()), _tag(key, found.meta["e_tag"])

    def list(self, prefix: str) -> dict[str, int]:
        with _translating(prefix):
            chunks = obstore.list(  # pyright: ignore[reportUnknownMemberType]
                self.store, prefix, chunk_size=_LIST_CHUNK
            )
            return {entry["path"]: entry["size"] for chunk in chunks for entry in chunk}

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _DELETE_CHUNK):
            chunk = list(keys[start : start + _DELETE_CHUNK])
            with _translating(chunk[0]), contextlib.suppress(FileNotFoundError):
                obstore.delete(self.store, chunk)


def open_objects(
    url: str,
    *,
    config: Mapping[str, Any] | None = None,
    request_timeout_s: float = 60.0,
    connect_timeout_s: float = 10.0,
) -> ObjectStore:
    """The object store at ``s3://bucket/prefix``, or the directory at ``file:///path``.

    Credentials, region and endpoint come from the environment (``AWS_ACCESS_KEY_ID``,
    ``AWS_REGION``, ``AWS_ENDPOINT_URL``, …), from the machine's role, or from ``config``. Bodies
    are not hashed for the signature: what was stored is read back and compared instead.

    Args:
        url: Where the run's objects are; one prefix per run.
        config: Settings of obstore's ``S3Store``, over those of the environment.
        request_timeout_s: Longest time for one request, its body included.
        connect_timeout_s: Longest time until a connection stands.

    Raises:
        ConfigError: Not such an address, or settings that do not exist.
    """
    if url.startswith("file://"):
        return open_local(url)
    if not url.startswith("s3://"):
        raise ConfigError(
            f"{url!r} is not the address of a remote tier",
            where="remote",
            rule="the store must be able to replace an object only if it is unchanged",
            way_out="use s3://bucket/prefix, with AWS_ENDPOINT_URL for other stores with that API,"
            " or file:///path",
        )
    settings: dict[str, Any] = {
        "unsigned_payload": "true",
        "conditional_put": "etag",
        **(config or {}),
    }
    client: Any = {
        "timeout": timedelta(seconds=request_timeout_s),
        "connect_timeout": timedelta(seconds=connect_timeout_s),
    }
    if _endpoint(settings).startswith("http://"):
        client["allow_http"] = True
    try:
        store = S3Store.from_url(
            url,
            config=settings,  # pyright: ignore[reportArgumentType]
            client_options=client,
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=request_timeout_s)},
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"cannot be opened ({_first_line(error)})",
            where=url,
            rule="s3://bucket/prefix, and settings that obstore's S3Store has",
            way_out="check the address and the settings",
        ) from error
    return ObstoreObjects(store)


@contextlib.contextmanager
def _translating(key: str) -> Generator[None]:
    """Errors of obstore become those of the protocol; ``FileNotFoundError`` passes."""
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise StorageError(
            f"the remote tier refuses access ({_first_line(error)})",
            where=key,
            rule=_RIGHTS,
            way_out="check the credentials and the bucket's policy",
        ) from error
    except (InvalidPathError, NotSupportedError, UnknownConfigurationKeyError) as error:
        raise StorageError(
            f"the remote tier cannot do this ({_first_line(error)})",
            where=key,
            rule=_RIGHTS,
            way_out="use a store with the S3 API, or file:///path",
        ) from error
    except (GenericError, BaseError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise RemoteUnavailableError(
            f"the remote tier failed ({_first_line(error)})",
            where=key,
            rule="every request is answered in time",
            way_out="it is tried again; check the address if it goes on",
        ) from error


def _tag(key: str, tag: str | None) -> str:
    if tag is None:
        raise StorageError(
            "the store gives objects no tags",
            where=key,
            rule="the pointer is replaced only if its tag is unchanged",
            way_out="use a store with ETags",
        )
    return tag


def _endpoint(settings: Mapping[str, Any]) -> str:
    """The address of the server, from the settings or from where the library looks for it."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    given = [settings.get("endpoint"), *(os.environ.get(name) for name in names)]
    return next((str(address) for address in given if address), "")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].strip() if lines else repr(error)
