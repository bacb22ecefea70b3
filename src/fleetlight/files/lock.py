# SPDX-License-Identifier: Apache-2.0
"""`FileLock`: a lock file that one process holds at a time, and that says which process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

#: what a file system without locks answers
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
#: a host name has at most 255 bytes
_SIGNATURE_BYTES = 512


class FileLock:
    """An open lock file. The kernel frees the lock of a process that dies."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Open the file, and create it where it does not exist."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        _open_locks.add(self)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> bool:
        """Take the lock and sign the file; False while another process holds it.

        Raises OSError with an errno in `NO_LOCKS` on a file system without locks.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        # the lock is valid without the signature, which a full disk may refuse
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return True

    def holder(self) -> str:
        """`process 12 on host`; empty if the process that holds the lock has not signed yet."""
        return _signature(self._fd)

    def release(self) -> None:
        """Release the lock and close the file; without effect in a forked child."""
        if self._fd < 0:
            return
        # closing is not enough: a child between fork and exec has a copy of the descriptor
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close()
        _open_locks.discard(self)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_open_locks: set[FileLock] = set()


def _close_in_child() -> None:
    """A forked child may outlive its parent, and must not keep the lock; nor may it unlock it."""
    for lock in _open_locks:
        lock._close()
    _open_locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


def holder_of(path: Path) -> str | None:
    """The signature of the process that holds a lock file; None if no process holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # no process has locked it yet, or this user may not ask
        return None
    try:
        # a shared lock, so that several processes may ask at the same time
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return _signature(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def _signature(fd: int) -> str:
    return os.pread(fd, _SIGNATURE_BYTES, 0).decode(errors="replace").strip()
