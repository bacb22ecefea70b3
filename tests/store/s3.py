# SPDX-License-Identifier: Apache-2.0
"""A real S3 server in a process of its own (moto), and a proxy that makes its network fail."""

import contextlib
import dataclasses
import http.client
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "AKIAOFTESTS",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests",
    "AWS_REGION": "us-east-1",
}

_SERVER = """
import sys, threading, logging
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclasses.dataclass
class S3Server:
    """The server; `new_bucket` makes an empty bucket."""

    port: int
    _buckets: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def new_bucket(self) -> str:
        self._buckets += 1
        name = f"bucket{self._buckets}"
        urllib.request.urlopen(
            urllib.request.Request(f"{self.endpoint}/{name}", method="PUT"), timeout=60
        ).close()
        return name


@contextlib.contextmanager
def running_server() -> Iterator[S3Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.strip().isdigit(), f"moto printed {line!r}"
        yield S3Server(int(line))
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


# -- faults


@dataclasses.dataclass(frozen=True)
class Status:
    """Answer in place of the server."""

    status: int
    code: str = "InternalError"
    message: str = "a message"


@dataclasses.dataclass(frozen=True)
class CutRequest:
    """Close the connection before the server has the request."""


@dataclasses.dataclass(frozen=True)
class LostReply:
    """The server does it, and the reply never arrives."""


@dataclasses.dataclass(frozen=True)
class CutReply:
    """The reply ends in the middle of its body."""


@dataclasses.dataclass(frozen=True)
class HalfObject:
    """The server gets and keeps half of the body."""


@dataclasses.dataclass(frozen=True)
class Stalled:
    """The reply stops in the middle of its body, and the connection stays open."""


Fault = Status | CutRequest | LostReply | CutReply | HalfObject | Stalled
#: the method and the path of a request -> what goes wrong with it
Rule = Callable[[str, str], Fault | None]


class FaultProxy:
    """Passes requests on to a server, except those that its `rule` lets fail."""

    def __init__(self, port: int) -> None:
        self.rule: Rule = lambda method, path: None
        #: method, path and bytes of each reply to a GET
        self.seen: list[tuple[str, str, int]] = []
        self.closing = threading.Event()
        proxy = self

        class Handler(_Handler):
            to = port
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def fail(self, fault: Fault, *, method: str = "", path: str = "", times: int = 1) -> None:
        """Let the next requests of this method and path (a regular expression) fail."""
        left, lock = [times], threading.Lock()

        def rule(its_method: str, its_path: str) -> Fault | None:
            fits = method in ("", its_method) and re.search(path, its_path)
            with lock:
                if not fits or not left[0]:
                    return None
                left[0] -= 1
                return fault

        self.rule = rule

    def fetched(self) -> int:
        """The bytes of all replies to GET so far."""
        return sum(size for method, _, size in self.seen if method == "GET")

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    to: int
    owner: FaultProxy

    def _serve(self) -> None:
        fault = self.owner.rule(self.command, self.path)
        if isinstance(fault, CutRequest):
            self._cut()
            return
        body = self._body()
        if isinstance(fault, Status):
            self._reply(fault.status, {}, _xml(fault) if self.command != "HEAD" else b"")
            return
        if isinstance(fault, HalfObject):
            body = body[: len(body) // 2]
        status, headers, reply = self._forwarded(body)
        self.owner.seen.append((self.command, self.path, len(reply)))
        if isinstance(fault, LostReply):
            self._cut()
        elif isinstance(fault, (CutReply, Stalled)):
            self._reply(status, headers, reply, sent=len(reply) // 2)
            if isinstance(fault, Stalled):
                self.owner.closing.wait(30)
            self._cut()
        else:
            self._reply(status, headers, reply)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _body(self) -> bytes:
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.to, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "content-length"}
        try:
            connection.request(self.command, self.path, body or None, headers)
            reply = connection.getresponse()
            kept = {k: v for k, v in reply.headers.items() if k.lower() in _KEPT}
            if self.command == "HEAD":
                kept["Content-Length"] = reply.headers.get("Content-Length", "0")
            return reply.status, kept, reply.read()
        finally:
            connection.close()

    def _reply(
        self, status: int, headers: dict[str, str], body: bytes, sent: int | None = None
    ) -> None:
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[:sent])
            self.wfile.flush()

    def _cut(self) -> None:
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


_KEPT = ("etag", "last-modified", "content-range", "content-type", "x-amz-version-id")


def _xml(fault: Status) -> bytes:
    return (
        f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message>"
        f"<AWSAccessKeyId>{VARIABLES['AWS_ACCESS_KEY_ID']}</AWSAccessKeyId></Error>"
    ).encode()
