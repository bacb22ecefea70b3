# SPDX-License-Identifier: Apache-2.0
"""Faults for the processes of a running job; each affects one process, by a seed.

cut     connections break at any byte of a frame, now and then
slow    bytes leave in small pieces, slowly, for a while
full    the disk is full for a moment, for a record or for a new file
clock   the wall clock jumps back and forth by hours
"""

import contextlib
import errno
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetlight.wire import plain

#: one of so many frames breaks, one starts a slow spell, one of so many writes finds a full disk
CUT_EVERY, SLOW_EVERY, FULL_EVERY = 150, 400, 60
#: one of so many new files finds a full disk: there are fewer of them
FULL_NEW_EVERY = 4
#: the names of folders that outlive a process
KEPT = ("server-", "worker-")
#: a slow spell: so many pieces, each so small and followed by a pause
PIECES, PIECE_BYTES, PAUSE_S = 40, 256, 0.002
DAY_S = 86400.0


def cut(chance: random.Random) -> None:
    """Break connections."""
    send = plain.Wire._send

    def broken(self: plain.Wire, buffers: Sequence[memoryview]) -> int:
        if chance.randrange(CUT_EVERY):
            return send(self, buffers)
        data = b"".join(buffers)
        with contextlib.suppress(OSError):
            self._socket.sendall(data[: chance.randrange(len(data) + 1)])
            self._socket.shutdown(socket.SHUT_RDWR)
        raise OSError(errno.ECONNRESET, "cut")

    plain.Wire._send = broken  # type: ignore[method-assign]


def slow(chance: random.Random) -> None:
    """Send bytes slowly for a while."""
    send, left = plain.Wire._send, 0

    def dribbling(self: plain.Wire, buffers: Sequence[memoryview]) -> int:
        nonlocal left
        if not left and not chance.randrange(SLOW_EVERY):
            left = PIECES
        if not left:
            return send(self, buffers)
        left -= 1
        time.sleep(PAUSE_S)
        first = next(part for part in buffers if len(part))
        return send(self, [first[: 1 + chance.randrange(PIECE_BYTES)]])

    plain.Wire._send = dribbling  # type: ignore[method-assign]


def full(chance: random.Random) -> None:
    """Fill the disk for a moment, perhaps within a record."""
    write = os.pwritev

    def refused(fd: int, buffers: Sequence[Any], offset: int, *more: Any) -> int:
        if chance.randrange(FULL_EVERY):
            return write(fd, buffers, offset, *more)
        data = b"".join(bytes(part) for part in buffers)
        write(fd, [data[: chance.randrange(len(data) + 1)]], offset, *more)
        raise no_room()

    os.pwritev = refused
    _full_for_new(random.Random(chance.random()))


def _full_for_new(chance: random.Random) -> None:
    """Fill the disk for new files in a folder that outlives the process."""
    opened, write = os.open, os.write

    def is_refused(path: Path) -> bool:
        return path.parent.name.startswith(KEPT) and not chance.randrange(FULL_NEW_EVERY)

    def not_opened(path: Any, flags: int, *more: Any, **where: Any) -> int:
        if flags & os.O_CREAT and is_refused(Path(os.fsdecode(path))):
            raise no_room()
        return opened(path, flags, *more, **where)

    def not_written(fd: int, data: Any) -> int:
        if not is_refused(Path(f"/proc/self/fd/{fd}").readlink()):
            return write(fd, data)
        write(fd, bytes(data)[: chance.randrange(len(data) + 1)])
        raise no_room()

    os.open, os.write = not_opened, not_written


def no_room() -> OSError:
    """The error of the system."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def clock(chance: random.Random) -> None:
    """Let the wall clock jump, but not the monotonic one."""
    seconds, nanoseconds = time.time, time.time_ns
    offset = 0.0

    def jumped() -> float:
        nonlocal offset
        if not chance.randrange(20):
            offset = chance.uniform(-DAY_S, DAY_S)
        return offset

    time.time = lambda: seconds() + jumped()
    time.time_ns = lambda: nanoseconds() + int(1e9 * jumped())


HARMS: dict[str, Callable[[random.Random], None]] = {
    "cut": cut,
    "slow": slow,
    "full": full,
    "clock": clock,
}


def install(names: Sequence[str], seed: str) -> None:
    """Apply these faults to this process from now on."""
    for name in names:
        HARMS[name](random.Random(f"{seed} {name}"))
