# SPDX-License-Identifier: Apache-2.0
"""`Guard`: lets only the user of this machine who has the link read the page.

The server listens on the loopback interface. But every program and every page in a browser of this
machine can connect to that, so each request needs the token, or the cookie that the link sets.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

        async def send_with_headers(message: Message) -> None:
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
