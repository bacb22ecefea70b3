# SPDX-License-Identifier: Apache-2.0
"""A folder that one process has at a time, and files in it that are whole or as before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from fleetlight.errors import JournalError
from fleetlight.ps.journal.segment import sync_folder

_LOCK = "lock"
#: a name of a host has at most 255 of them
_SIGNATURE_BYTES = 512
#: the locks of this process; a child that it forks has no part in them
_held: set[int] = set()


def claim(path: Path) -> int:
    """Make the folder if need be, and lock it; nobody else has it until that is closed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(
            f"durability: {path} cannot be used: {error.strerror or error}; name another "
            "folder in strategy.durability_configs.folder"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        whose = _signature(lock)
        os.close(lock)
        raise _in_use(path, whose) from error
    _sign(lock)
    _held.add(lock)
    return lock


def refuse_if_in_use(path: Path) -> None:
    """Raise where another process has the folder; it is left as it is."""
    try:
        lock = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # it was never locked, or is not for this user to ask about
        return
    try:
        # several may ask at a time
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        raise _in_use(path, _signature(lock)) from error
    finally:
        os.close(lock)


def _sign(lock: int) -> None:
    """Tell others who has the folder; the lock holds without it."""
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _signature(lock: int) -> str:
    """Whose it is, for a sentence; empty where that one has not signed yet."""
    text = os.pread(lock, _SIGNATURE_BYTES, 0).decode(errors="replace")
    return f" ({text})" if text else ""


def _in_use(path: Path, whose: str) -> JournalError:
    return JournalError(
        f"durability: {path} is in use by another process{whose}; give each job a folder of its "
        "own in strategy.durability_configs.folder, or end the other one"
    )


def release(lock: int) -> None:
    """Let others have the folder."""
    _held.discard(lock)
    os.close(lock)


def _let_go() -> None:
    """In a child: it may live on when its parent was killed, and would keep the folder."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def replace(path: Path, data: bytes) -> None:
    """A file that is whole or as before, also after a power failure."""
    beside = path.with_name(f"{path.name}.new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            # a disk that becomes full takes a part, and refuses the next one
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    beside.replace(path)
    sync_folder(path.parent)
