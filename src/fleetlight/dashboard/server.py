# SPDX-License-Identifier: Apache-2.0
"""The web application of the page, and the program that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping
from mimetypes import guess_type
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvicorn
from starlette import types
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fleetlight.dashboard.feed import JobFeed, Message
from fleetlight.dashboard.log_files import log_names, read_log
from fleetlight.dashboard.prometheus import metrics_text

_HOSTS = {"127.0.0.1", "localhost", "::1"}
#: everything that the page loads is part of it
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class Guard:
    """Middleware: checks method, Host, Origin and token, and adds headers to every response."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        # browsers send a cookie to all ports of a host
        self._cookie = f"fleetlight_{port}"
        #: the value of the cookie, so that a browser does not store the token
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, and pass on the others."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: types.Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    # a response may have a stricter policy of its own
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope) or self._without_token_in_link(scope)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _name_of(f"//{host}") not in _HOSTS or len(headers.getlist("host")) != 1:
            # another name may resolve to this machine: a page of that name must not read this one
            return _refused(403, f"got the host {host[:100]!r}, expected 127.0.0.1 or localhost")
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return _refused(403, f"got the origin {origin[:100]!r}, expected http://{host}")
        if scope["method"] not in ("GET", "HEAD"):
            return _refused(405, "this page is read-only: GET only")
        if not self._is_allowed(scope, headers):
            return _refused(
                401, "open the link that fleetrun printed: it has a token, which this address lacks"
            )
        return None

    def _is_allowed(self, scope: Scope, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _equal(given.strip(), self._token):
            return True
        return _equal(_token_of(scope), self._token) or _equal(
            _cookie_of(headers, self._cookie), self._session
        )

    def _without_token_in_link(self, scope: Scope) -> Response | None:
        """The answer to the link: the same page without the token in its address."""
        if scope["path"] != "/" or not _token_of(scope):
            return None
        answer = RedirectResponse("/", 303)
        # a link in another page may lead here; that page can read nothing
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="lax")
        return answer


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status)


def _name_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _token_of(scope: MutableMapping[str, Any]) -> str:
    query = scope["query_string"].decode("latin-1")
    return parse_qs(query).get("token", [""])[0] if query else ""


def _cookie_of(headers: Headers, name: str) -> str:
    # browsers also send the cookies of other ports, which may have any form
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _equal(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())


#: pages that may be open
_MAX_CLIENTS = 32
#: without news, a comment shows that the connection works
_COMMENT_EVERY_S = 10.0
#: how long one message may take; a browser that sleeps connects again
_SEND_DEADLINE_S = 30.0


class EventStream:
    """A response that ends with the client or the feed."""

    def __init__(self, feed: JobFeed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send messages until the client leaves, takes none, or the server ends."""
        if scope["method"] == "HEAD":
            await Response(media_type="text/event-stream")(scope, receive, send)
            return
        with self._feed.client() as clients:
            if clients > _MAX_CLIENTS:
                text = f"{_MAX_CLIENTS} pages are open; close one\n"
                await PlainTextResponse(text, 503)(scope, receive, send)
                return
            tasks = [asyncio.ensure_future(work) for work in (self._send_all(send), _left(receive))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                # a connection that was lost while a message was sent
                await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(OSError, RuntimeError, asyncio.TimeoutError):
            end = send({"type": "http.response.body", "body": b""})
            await asyncio.wait_for(end, _COMMENT_EVERY_S)

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.to_thread(self._feed.poll)
        last: Message | None = None
        is_over = False
        while not is_over:
            is_over = self._feed.is_over
            message = self._feed.message(last)
            body = b":\n\n" if message is None else _event(message)
            part = send({"type": "http.response.body", "body": body, "more_body": True})
            # a client that reads nothing fills the socket, and this waits
            await asyncio.wait_for(part, _SEND_DEADLINE_S)
            last = message or last
            if last is not None:
                await self._feed.wait(last.version, _COMMENT_EVERY_S)


def _event(message: Message) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (message.kind.encode(), message.data)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


_PAGE = Path(__file__).with_name("page")
#: in memory: reading them in threads takes long beside processes that train
_FILES = {path.name: (path.read_bytes(), guess_type(path.name)[0]) for path in _PAGE.iterdir()}
#: programs on one machine: more would only cost memory
_MAX_CONNECTIONS = 128
_MAX_SEARCH_LENGTH = 200
#: scripts and loads of a picture are refused, even where it is opened as a page of its own
_PICTURE_POLICY = {"content-security-policy": "default-src 'none'; frame-ancestors 'none'; sandbox"}
_END_S = 2


class Pages:
    """The responses, each to a GET."""

    def __init__(self, feed: JobFeed, folder: Path) -> None:
        self._feed, self._folder = feed, folder

    @property
    def routes(self) -> list[Route]:
        """The response of each path."""
        return [
            Route("/", self._index),
            Route("/feed", EventStream(self._feed)),
            Route("/logs", self._logs),
            Route("/logs/{name}", self._log),
            Route("/metrics", self._metrics),
            Route("/program.svg", self._picture),
            Route("/{name}", self._file),
        ]

    async def _index(self, request: Request) -> Response:
        return _file("index.html")

    async def _file(self, request: Request) -> Response:
        return _file(request.path_params["name"])

    async def _logs(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(log_names, self._folder))

    async def _log(self, request: Request) -> Response:
        name = request.path_params["name"]
        find = request.query_params.get("find", "")[:_MAX_SEARCH_LENGTH]
        found = await asyncio.to_thread(read_log, self._folder, name, find)
        return _missing() if found is None else JSONResponse(found)

    async def _metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(metrics_text, self._feed.newest)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _picture(self, request: Request) -> Response:
        picture = self._feed.picture
        if picture is None:
            return _missing()
        return Response(picture, headers=_PICTURE_POLICY, media_type="image/svg+xml")


def _file(name: str) -> Response:
    if name not in _FILES:
        return _missing()
    content, kind = _FILES[name]
    return Response(content, media_type=kind)


def _missing() -> Response:
    return PlainTextResponse("not found\n", 404)


def application(feed: JobFeed, folder: Path, token: str, port: int) -> ASGIApp:
    """The application for the job in a log folder."""
    pages = Pages(feed, folder)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(feed.run())
        yield
        following.cancel()

    app = Starlette(routes=pages.routes, lifespan=lifespan)
    return Guard(app, token, port)


class PageServer(uvicorn.Server):
    """Sends the last news before it ends: they say how the job has ended."""

    def __init__(self, config: uvicorn.Config, feed: JobFeed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End event streams, then connections."""
        await self._feed.end()
        await super().shutdown(sockets)


def serve(folder: Path, listener: socket.socket, token: str, ready: Callable[[], None]) -> None:
    """Serve the page until SIGINT, SIGTERM or a hangup; then return."""
    feed = JobFeed(folder)
    app = application(feed, folder, token, listener.getsockname()[1])
    config = uvicorn.Config(
        app,
        # a request may have the token in its address
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_END_S,
        ws="none",
    )
    server = PageServer(config, feed)
    with contextlib.suppress(KeyboardInterrupt):
        # after its end uvicorn raises the signal again, which would kill the process
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # nohup ignores SIGHUP, and so does the page then
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, server.handle_exit)
        ready()
        asyncio.run(server.serve(sockets=[listener]))
