# SPDX-License-Identifier: Apache-2.0
"""A page that is served to real connections, in a thread of the test."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from tests.dashboard.simulated import SimulatedJob

from fleetlight.dashboard.feed import JobFeed
from fleetlight.dashboard.server import PageServer, application
from fleetlight.launch.processes.followers.dashboard import listen

TOKEN = "the-token-of-the-test"
#: every wait in these tests ends here; only a broken server gets near it
DEADLINE_S = 30.0


class Site:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def link(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={TOKEN}"

    def get(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """The answer to one request with the token."""
        return self.ask(path, {"Authorization": f"Bearer {TOKEN}", **(headers or {})}, method)

    def ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """The answer to one request without the token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, headers=dict(headers))
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()
        finally:
            connection.close()

    @contextlib.contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
        """The messages of the feed, as a page gets them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request("GET", "/feed", headers={"Authorization": f"Bearer {TOKEN}"})
            yield messages(connection.getresponse())
        finally:
            connection.close()

    def stalled(self) -> socket.socket:
        """A page that asks for the feed and reads nothing."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", self.port))
        host = f"127.0.0.1:{self.port}"
        request = f"GET /feed HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        sock.sendall(request.encode())
        return sock


def messages(reply: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events."""
    kind = ""
    while line := reply.readline().decode().rstrip("\n"):
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))
            reply.readline()
        else:
            # a comment, and the empty line after it
            reply.readline()


@contextlib.contextmanager
def serving(job: SimulatedJob) -> Iterator[Site]:
    """Serve the page of a job, whose clock stands still between its metrics."""
    with listen(0) as listener:
        port = listener.getsockname()[1]
        feed = JobFeed(job.folder, lambda: job.at + 0.5)
        app = application(feed, job.folder, TOKEN, port)
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1)
        server = PageServer(config, feed)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield Site(port)
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
