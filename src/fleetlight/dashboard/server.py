# SPDX-License-Identifier: Apache-2.0
"""The web application of the page, and the program that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable
from mimetypes import guess_type
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fleetlight.dashboard.event_stream import EventStream
from fleetlight.dashboard.feed import JobFeed
from fleetlight.dashboard.guard import Guard
from fleetlight.dashboard.log_files import log_names, read_log
from fleetlight.dashboard.prometheus import metrics_text

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
