# SPDX-License-Identifier: Apache-2.0
"""URLs of stores: which texts are one, and how they appear in messages."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from fleetlight.errors import ConfigError

#: a folder, or the URL of one
Location = str | os.PathLike[str]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
#: `Path("s3://bucket/run")` is `s3:/bucket/run`
_COLLAPSED = re.compile(r"(s3|gs|az|abfss?|hdfs|https?):/[^/]")
_SECRET = re.compile(r"//[^/@\s]*@|\?[^\s\"']*")


def is_url(location: Location) -> bool:
    """True for `s3://bucket/run` and the like, False for a path."""
    text = os.fspath(location)
    if _COLLAPSED.match(text):
        scheme, _, rest = text.partition(":/")
        raise ConfigError(
            f"got the path {text!r}, which was a URL before pathlib removed a slash; pass "
            f"{f'{scheme}://{rest}'!r} as a string"
        )
    return _SCHEME.match(text) is not None


def absolute(location: Location) -> str:
    """A URL as it is, or an absolute path: the script may change its working directory."""
    text = os.fspath(location)
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)


def joined(location: str, name: str) -> str:
    """The location of a folder or a file in a location."""
    return f"{location.rstrip('/')}/{name}"


def checked(url: str) -> str:
    """The URL without a slash at its end; ConfigError for one with credentials or a query."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"{shown(url)}: got a URL with credentials or a query, expected "
            "scheme://bucket/folder; give credentials and options in variables such as "
            "AWS_ACCESS_KEY_ID, AWS_REGION and AWS_ENDPOINT_URL"
        )
    if not parts.netloc and not parts.path.strip("/"):
        raise ConfigError(f"got the URL {url!r}, expected scheme://bucket/folder")
    return url.rstrip("/")


def shown(text: str) -> str:
    """A text for a message: without the user, the password and the query of URLs in it."""
    return _SECRET.sub(lambda found: "//" if found[0].startswith("//") else "", text)


def local_path(url: str) -> str:
    """The path of a file:// URL."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{url}: got host {parts.netloc!r}, expected file:///absolute/path")
    return unquote(parts.path)
