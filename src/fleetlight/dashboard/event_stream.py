# SPDX-License-Identifier: Apache-2.0
"""`EventStream`: server-sent events of a feed, to one client."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from fleetlight.dashboard.feed import JobFeed, Message

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
