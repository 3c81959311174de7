"""A real S3 server on loopback, for tests of the remote tier."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import logging
from collections.abc import Generator
from dataclasses import dataclass

from perdure.checkpoint.tier import ObstoreObjects, open_objects

BUCKET = "perdure-tests"
_prefixes = itertools.count()


@dataclass(frozen=True)
class S3Server:
    """Address of a server that has :data:`BUCKET`."""

    address: tuple[str, int]

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}"


def new_prefix() -> str:
    """A prefix that no other test of this process uses."""
    return f"run-{next(_prefixes)}"


def s3_objects(endpoint: str, prefix: str, *, request_timeout_s: float = 20.0) -> ObstoreObjects:
    return open_objects(
        f"s3://{BUCKET}/{prefix}",
        config={
            "endpoint": endpoint,
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "test",
        },
        request_timeout_s=request_timeout_s,
    )


@contextlib.contextmanager
def s3_server() -> Generator[S3Server]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        address = server.get_host_and_port()
        connection = http.client.HTTPConnection(*address, timeout=30)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield S3Server(address)
    finally:
        server.stop()
