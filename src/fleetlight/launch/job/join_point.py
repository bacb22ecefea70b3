# SPDX-License-Identifier: Apache-2.0
"""`JoinPoint`: where workers join a running job; its launcher leaves it in the log folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

from fleetlight.errors import ConfigError, RoleError
from fleetlight.roles.role import endpoint_text, parse_endpoint
from fleetlight.roles.secret import Secret, parse_token

#: the file in the log folder; only its owner may read it
NAME = "join.json"


@dataclasses.dataclass(frozen=True)
class JoinPoint:
    """Server 0 of a job, and the token of the job."""

    server: str
    token: Secret | None = None

    def write(self, folder: Path) -> None:
        """Leave it in the log folder, as long as the job runs."""
        path = folder / NAME
        remove(folder)
        token = None if self.token is None else self.token.reveal()
        with open(path, "x", opener=_for_the_owner) as file:
            json.dump({"server": self.server, "token": token}, file)


def remove(folder: Path) -> None:
    """Remove the file, since the job has ended."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink()


def join_point(text: str, token: Secret | None) -> JoinPoint:
    """The value of `--join`: host:port, or the log folder of a job on this machine."""
    if not text:
        raise ConfigError("--join: got an empty text, expected HOST:PORT of server 0 or LOG_DIR")
    if Path(text).is_dir():
        return _read(Path(text), token)
    try:
        return JoinPoint(endpoint_text(parse_endpoint(text, "--join")), token)
    except RoleError as error:
        raise ConfigError(f"{error}, or the log folder of a job on this machine") from None


def _read(folder: Path, token: Secret | None) -> JoinPoint:
    path = folder / NAME
    try:
        found = json.loads(path.read_text())
        server, known = str(found["server"]), found["token"]
    except FileNotFoundError:
        raise ConfigError(
            f"--join {folder}: no job that workers may join runs with this log folder; start one "
            "with fleetrun --worker_max N --log_dir, or pass --join HOST:PORT of server 0"
        ) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--join {folder}: {path} cannot be read: {error}") from None
    return JoinPoint(server, token or (parse_token(known, str(path)) if known else None))


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
