"""A loopback HTTP proxy that breaks chosen requests, in front of a real server."""

from __future__ import annotations

import contextlib
import enum
import socket
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

CHUNK = 1 << 16


class Fault(enum.Enum):
    """What happens to one request."""

    UNAVAILABLE = "503 instead of an answer"
    FORBIDDEN = "403 instead of an answer"
    RESET_IN_REQUEST = "the connection is reset in the middle of the body that is sent"
    ANSWER_LOST = "the server does it, the connection is reset instead of an answer"
    RESET_IN_ANSWER = "the connection is reset in the middle of the body that comes back"
    TRUNCATED = "half of the body comes back and the connection is closed"
    SHORT = "half of the body comes back as if it were all"
    FLIPPED = "one bit of the body that comes back is another"
    BLACK_HOLE = "no answer ever"
    SLOW = "the answer trickles"


_STATUS: dict[Fault | None, str] = {
    Fault.UNAVAILABLE: "503 Slow Down",
    Fault.FORBIDDEN: "403 Forbidden",
}
Plan = Callable[[str, str], Fault | None]
"""Method and target of a request → what happens to it."""


class FaultProxy:
    """Listens on loopback; one request a connection. Use it as a context manager."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.plan: Plan = lambda method, target: None
        self.struck: Counter[Fault] = Counter()
        self.requests = 0
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def decide(self, method: str, target: str) -> Fault | None:
        with self._lock:
            self.requests += 1
            fault = self.plan(method, target)
            if fault is not None:
                self.struck[fault] += 1
            return fault

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=20)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


def _handler(proxy: FaultProxy) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            # A client that gives up, or a server that is gone, ends only this connection.
            with contextlib.suppress(OSError, ValueError):
                _serve(proxy, self.request)

    return Handler


def _serve(proxy: FaultProxy, client: socket.socket) -> None:
    client.settimeout(60)
    head, rest = _read_head(client)
    if not head:
        return
    method, target = head.split(b" ", 2)[:2]
    fault = proxy.decide(method.decode(), target.decode())
    length = int(_header(head, b"content-length") or 0)
    if fault is Fault.BLACK_HOLE:
        proxy.closed.wait(60)
        return
    if fault is Fault.RESET_IN_REQUEST:
        _read_body(client, rest, length // 2)
        _reset(client)
        return
    if b"100-continue" in head.lower():
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = _read_body(client, rest, length)
    if fault in _STATUS:
        client.sendall(
            f"HTTP/1.1 {_STATUS[fault]}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        return
    answer, content = _forward(proxy.upstream, head, body, has_body=method != b"HEAD")
    _answer(proxy, client, answer, content, fault)


def _answer(
    proxy: FaultProxy, client: socket.socket, answer: bytes, content: bytes, fault: Fault | None
) -> None:
    half = content[: len(content) // 2]
    if fault is Fault.ANSWER_LOST:
        _reset(client)
    elif fault is Fault.RESET_IN_ANSWER:
        client.sendall(answer + half)
        _reset(client)
    elif fault is Fault.TRUNCATED:
        client.sendall(answer + half)
    elif fault is Fault.SHORT:
        client.sendall(_with_length(answer, len(half)) + half)
    elif fault is Fault.FLIPPED and content:
        client.sendall(answer + content[:-1] + bytes([content[-1] ^ 1]))
    elif fault is Fault.SLOW:
        client.sendall(answer)
        step = max(1, len(content) // 8)
        for start in range(0, len(content), step):
            if proxy.closed.wait(0.05):
                return
            client.sendall(content[start : start + step])
    else:
        client.sendall(answer + content)


def _forward(
    upstream: tuple[str, int], head: bytes, body: bytes, *, has_body: bool
) -> tuple[bytes, bytes]:
    """Ask the server; returns the head of its answer, with a length, and the body."""
    with socket.create_connection(upstream, timeout=60) as server:
        server.sendall(_closing(head) + body)
        answer, rest = _read_head(server)
        if not has_body:
            return _closing(answer), b""
        length = _header(answer, b"content-length")
        if length is not None:
            return _closing(answer), _read_body(server, rest, int(length))
        while chunk := server.recv(CHUNK):
            rest += chunk
    if (_header(answer, b"transfer-encoding") or b"").lower() == b"chunked":
        rest = _unchunked(rest)
    return _with_length(_closing(answer), len(rest)), rest


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(CHUNK)
        if not chunk:
            return b"", b""
        data += chunk
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _read_body(connection: socket.socket, have: bytes, length: int) -> bytes:
    body = bytearray(have)
    while len(body) < length:
        chunk = connection.recv(CHUNK)
        if not chunk:
            raise OSError("the body ended early")
        body += chunk
    return bytes(body)


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def _without(head: bytes, *names: bytes) -> bytes:
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in lines[1:] if line.partition(b":")[0].strip().lower() not in names]
    return b"\r\n".join([lines[0], *kept]) + b"\r\n"


def _closing(head: bytes) -> bytes:
    return _without(head, b"connection") + b"Connection: close\r\n\r\n"


def _with_length(head: bytes, length: int) -> bytes:
    rest = _without(head, b"content-length", b"transfer-encoding")
    return rest + f"Content-Length: {length}\r\n\r\n".encode()


def _unchunked(data: bytes) -> bytes:
    out = bytearray()
    while data:
        size_text, _, data = data.partition(b"\r\n")
        size = int(size_text.split(b";")[0], 16)
        if size == 0:
            break
        out += data[:size]
        data = data[size + 2 :]
    return bytes(out)


def _reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    linger: Any = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
