# SPDX-License-Identifier: Apache-2.0
"""`LocalStore`: objects as files of a local folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from fleetlight.errors import MissingObjectError, StoreError, StoreRefusedError
from fleetlight.files import atomic
from fleetlight.files.lock import NO_LOCKS, FileLock
from fleetlight.store.protocol import Data, Entry, Object, Span
from fleetlight.store.urls import joined

_LOCK, _NEW = ".store-lock", ".new"
#: a lock is held for the time of two system calls
_LOCK_S, _POLL_S = 30.0, 0.005


class LocalStore:
    """A folder. A file is replaced as a whole, and on disk when a method returns."""

    is_exact = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(os.path.abspath(folder))

    @property
    def url(self) -> str:
        """See `ObjectStore`."""
        return self._folder.as_uri()

    def head(self, name: str) -> Entry | None:
        """See `ObjectStore`."""
        with self._explained("look for", name):
            try:
                found = os.stat(self._path(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return Entry(name, found.st_size, _version(found))

    def get(self, name: str) -> Object:
        """See `ObjectStore`."""
        with self._explained("read", name), self._path(name).open("rb") as file:
            found = os.fstat(file.fileno())
            return Object(name, found.st_size, _version(found), file.read())

    def get_ranges(self, name: str, spans: Sequence[Span]) -> list[Data]:
        """See `ObjectStore`."""
        with self._explained("read", name), self._path(name).open("rb") as file:
            return [self._range(file.fileno(), name, *span) for span in spans]

    def put(self, name: str, data: Data | Path) -> str:
        """See `ObjectStore`."""
        with self._explained("write", name), self._written(name, data) as temporary:
            return self._move(temporary, name)

    def create(self, name: str, data: Data) -> str | None:
        """See `ObjectStore`."""
        with self._new_under_lock("create", name, data) as temporary:
            return None if self._path(name).exists() else self._move(temporary, name)

    def swap(self, name: str, data: Data, version: str) -> str | None:
        """See `ObjectStore`."""
        with self._new_under_lock("replace", name, data) as temporary:
            there = self.head(name)
            is_same = there is not None and there.version == version
            return self._move(temporary, name) if is_same else None

    def list(self, prefix: str = "") -> list[Entry]:
        """See `ObjectStore`."""
        found = []
        with self._explained("list", prefix):
            # a prefix may end inside a name
            start = self._path(prefix).parent if prefix and prefix[-1] != "/" else prefix
            for folder, _, names in os.walk(self._folder / start):
                for name in names:
                    path = Path(folder, name)
                    relative = path.relative_to(self._folder).as_posix()
                    if relative.startswith(prefix) and name != _LOCK and not _is_temporary(name):
                        with contextlib.suppress(FileNotFoundError):
                            stat = path.stat()
                            found.append(Entry(relative, stat.st_size, _version(stat)))
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, names: Iterable[str]) -> None:
        """See `ObjectStore`."""
        for name in names:
            path = self._path(name)
            with self._explained("delete", name):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
                # stores have no empty folders
                with contextlib.suppress(OSError):
                    while (path := path.parent) != self._folder:
                        path.rmdir()

    def _path(self, name: str) -> Path:
        """The file of a name, which must be inside the folder."""
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name:
            raise StoreRefusedError(f"{self.url}: got the name {name!r}, expected one inside it")
        return self._folder / name

    @contextlib.contextmanager
    def _written(self, name: str, data: Data | Path) -> Iterator[Path]:
        """A temporary file with this content, on disk."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{_NEW}")
        try:
            with open(temporary, "xb", buffering=0) as file:
                if isinstance(data, Path):
                    with data.open("rb") as source:
                        shutil.copyfileobj(source, file, 4 << 20)
                else:
                    atomic.write_all(file.fileno(), memoryview(data))
                os.fsync(file.fileno())
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    @contextlib.contextmanager
    def _new_under_lock(self, operation: str, name: str, data: Data) -> Iterator[Path]:
        with (
            self._explained(operation, name),
            self._written(name, data) as temporary,
            self._locked(),
        ):
            yield temporary

    def _move(self, temporary: Path, name: str) -> str:
        version = _version(temporary.stat())
        os.replace(temporary, self._path(name))
        atomic.sync_folder_if_supported(temporary.parent)
        return version

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out, as long as two system calls take."""
        with FileLock(self._folder / _LOCK) as lock:
            until = time.monotonic() + _LOCK_S
            try:
                while not lock.acquire():
                    if time.monotonic() > until:
                        raise StoreError(
                            f"{self.url}: {lock.holder() or 'another process'} has held its lock "
                            f"for {_LOCK_S:g} s; see what that process waits for"
                        )
                    time.sleep(_POLL_S)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield

    def _range(self, fd: int, name: str, start: int, stop: int) -> bytes:
        parts = []
        while start < stop:
            part = os.pread(fd, stop - start, start)
            if not part:
                raise StoreError(f"{self.url}: {name} ends before byte {stop}; read it again")
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    @contextlib.contextmanager
    def _explained(self, operation: str, name: str) -> Iterator[None]:
        """Errors of the operating system, in words."""
        where = joined(self.url, name)
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingObjectError(
                f"{where}: could not {operation}: there is no such file"
            ) from None
        except OSError as error:
            raise StoreRefusedError(
                f"{where}: could not {operation}: {error.strerror or error}; check the folder and "
                "its disk"
            ) from error


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(_NEW)
