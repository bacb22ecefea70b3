# SPDX-License-Identifier: Apache-2.0
"""The process of the live page: its port, its link, its start and its end.

The port is bound here, so that a port that is taken is an error before the job starts.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from fleetlight.errors import ConfigError, LaunchError
from fleetlight.launch.processes.child import Reaper
from fleetlight.launch.processes.followers.follower import Follower

#: the token of the page, for programs of this user such as Prometheus
TOKEN_FILE = "dashboard.token"
LOG_FILE = "dashboard.log"
_HOST = "127.0.0.1"
#: how long the process has to end on request
_END_S = 4.0
_SEND_BUFFER = 256 << 10
_PACKAGES = ("starlette", "uvicorn", "prometheus_client")


def check_packages() -> None:
    """Raise an error if a package of the page is missing; imports none."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the page needs {', '.join(missing)}: pip install 'fleetlight[dashboard]', or omit "
            "--dashboard"
        )


def listen(port: int, flag: str = "--dashboard_port") -> socket.socket:
    """A socket that listens on this machine only; `flag` is what the user can change."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # for all connections: a page that reads nothing occupies no more of the kernel's memory
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.bind((_HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "is not allowed for this user"
        raise ConfigError(
            f"port {port} of the page {why}; pass {flag} with another port, or omit it for a "
            "free port"
        ) from None
    return listener


def link(listener: socket.socket, token: str) -> str:
    """The address of the page."""
    return f"http://{_HOST}:{listener.getsockname()[1]}/?token={token}"


def make_token(folder: Path) -> str:
    """A random token, which a file of this user in a log folder has as well."""
    token = secrets.token_urlsafe(16)
    path = folder / TOKEN_FILE
    try:
        path.unlink(missing_ok=True)
        # a file that was there might be readable for others
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(token)
    except OSError as error:
        raise LaunchError(f"cannot write the token of the page, {path}: {error}") from None
    return token


def read_token(folder: Path) -> str:
    """The token that fleetrun has made for the page of a log folder."""
    return (folder / TOKEN_FILE).read_text(encoding="ascii")


def remove_token(folder: Path, token: str) -> None:
    """Remove the file of a token, unless a later page has made its own."""
    with contextlib.suppress(OSError, ValueError):
        if read_token(folder) == token:
            (folder / TOKEN_FILE).unlink()


class DashboardProcess:
    """The page of the job in a log folder; it ends with the launcher, however that ends."""

    def __init__(
        self, folder: Path, port: int, environment: Mapping[str, str], reaper: Reaper
    ) -> None:
        self._folder = folder
        with listen(port) as listener:
            self._token = make_token(folder)
            self.link = link(listener, self._token)
            descriptor = listener.fileno()
            command = ("dashboard", str(folder), "--descriptor", str(descriptor))
            log = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                self._follower = Follower(
                    command, environment, reaper, output=log, keep=(descriptor,)
                )
            finally:
                os.close(log)

    def close(self) -> None:
        """Let the process show how the job has ended, and end it."""
        self._follower.ask_to_end()
        self._follower.end(_END_S)
        remove_token(self._folder, self._token)
