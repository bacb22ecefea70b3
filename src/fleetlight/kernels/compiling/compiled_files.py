# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled kernels, so that only the first process of a machine compiles.

numba's own folder serves all functions of a program, and environment variables set it. This folder
has only Fleetlight's kernels. Its name is a digest of their sources.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fleetlight.files.lock import FileLock
from fleetlight.kernels.compiling import loading

_SOURCES = Path(__file__).parents[1]
_BESIDE = _SOURCES / "__pycache__"
#: longer than kernels take to compile; after it a process compiles a kernel itself
LOCK_WAIT_S = 30.0


class Turn:
    """A process's turn to compile a kernel; the next process loads the code.

    A process waits only while the code is missing. After one timeout it waits for no other kernel.
    """

    _has_given_up = False

    def __init__(self) -> None:
        self._lock: FileLock | None = None
        self._deadline = 0.0
        self._has_come = False

    def __enter__(self) -> Turn:
        return self

    def wait(self) -> bool:
        """Wait a moment for the turn; return whether to look for the code again."""
        if self._lock is None and not self._has_come:
            self._open()
        if self._lock is None or self._has_come:
            return False
        try:
            self._has_come = self._lock.acquire()
        except OSError:  # a file system without locks
            self._has_come = True
        if self._has_come:
            return True
        if time.monotonic() >= self._deadline:
            Turn._has_given_up = self._has_come = True
            return False
        time.sleep(0.02)
        return True

    def _open(self) -> None:
        folder = place()
        with contextlib.suppress(OSError):  # for example, a lock file of another user
            self._lock = None if folder is None else FileLock(folder / "lock")
        self._deadline = time.monotonic() + (0 if Turn._has_given_up else LOCK_WAIT_S)

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()


def keep(dispatcher: Any, prefetch: bool, turn: Turn) -> None:
    """Let numba load and store the code of this function in the folder, if there is one.

    numba compiles missing code in this process's turn.
    """
    from numba.core import caching

    folder = place()
    if folder is None:
        return
    where = folder / ("prefetch" if prefetch else "plain")

    class Locator(caching._CacheLocator):
        """Gives numba the folder; the kernel names the file."""

        _py_file = str(_SOURCES)

        def get_cache_path(self) -> str:
            return str(where)

        def get_source_stamp(self) -> str:
            return where.parent.name

        def get_disambiguator(self) -> str:
            return "kernel"

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            return cls()

    class Implementation(caching.CompileResultCacheImpl):
        """Starts the compiler only for code that cannot be loaded as it is."""

        _locator_classes = [Locator]  # type: ignore[list-item]  # noqa: RUF012

        def rebuild(self, target_context: Any, payload: Any) -> Any:
            if not loading.is_ready(payload):
                target_context.refresh()
            return super().rebuild(target_context, payload)  # type: ignore[no-untyped-call]

    class Cache(caching.FunctionCache):
        """Looks for a kernel before it starts the compiler."""

        _impl_class = Implementation

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            with self._guard_against_spurious_io_errors():
                found = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
                while found is None and turn.wait():
                    found = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
                return found

    dispatcher._cache = Cache(dispatcher.py_func)  # type: ignore[no-untyped-call]


def is_own(function: Callable[..., Any]) -> bool:
    """Whether the digest in the folder's name covers the source of this function."""
    return Path(function.__code__.co_filename).is_relative_to(_SOURCES)


@functools.cache
def place() -> Path | None:
    """The first writable folder: beside the sources, in the user's cache, or a temporary one."""
    for parent in _candidates():
        folder = parent / f"kernels-{_stamp()}"
        with contextlib.suppress(OSError):
            if parent == _BESIDE:
                # users who can write there can also change the sources
                folder.mkdir(parents=True, exist_ok=True)
            else:
                _own(folder)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
    return None


def _candidates() -> Iterator[Path]:
    yield _BESIDE
    with contextlib.suppress(OSError, RuntimeError):  # no home directory
        yield _own(_users_cache() / "fleetlight")
    with contextlib.suppress(OSError):
        yield _own(Path(tempfile.gettempdir()) / f"fleetlight-{os.getuid()}")


def _users_cache() -> Path:
    """The cache folder of this user."""
    # by the XDG standard, relative paths are ignored
    said = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return said if said.is_absolute() else Path.home() / ".cache"


def _own(folder: Path) -> Path:
    """Return a folder that no other user can write to, because Fleetlight loads code from it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    if not private or found.st_uid != os.getuid():
        raise PermissionError(f"others can write to {folder}")
    return folder


@functools.cache
def _stamp() -> str:
    """A digest of the sources and of the versions of numba and Python."""
    import numba

    digest = hashlib.sha256(f"{numba.__version__} {sys.version}".encode())
    for source in sorted(_SOURCES.rglob("*.py")):
        digest.update(str(source.relative_to(_SOURCES)).encode() + source.read_bytes())
    return digest.hexdigest()[:16]
