# SPDX-License-Identifier: Apache-2.0
"""`FilesystemStore`: any file system of fsspec, such as hdfs, with a weaker guarantee.

fsspec has no atomic condition: `create` and `swap` look first and write then, so two writers at the
same moment may both succeed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import posixpath
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fleetlight.errors import ConfigError, MissingObjectError
from fleetlight.store.failures import Explanation
from fleetlight.store.protocol import Data, Entry, Object, Span
from fleetlight.store.retries import Limits, Passing, retried
from fleetlight.store.urls import joined, shown

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_warned: set[str] = set()
#: how the name of an object ends while another one takes its place
_BEFORE = ".fleet-before"


class FilesystemStore:
    """Objects as files; a new file is written beside its place, then moved."""

    is_exact = False

    def __init__(self, url: str, limits: Limits, options: dict[str, Any]) -> None:
        self._url, self._limits = url, limits
        self._fs, root = _filesystem(url, options)
        self._root = root.rstrip("/")
        _warn_once(url)

    @property
    def url(self) -> str:
        """See `ObjectStore`."""
        return self._url

    def head(self, name: str) -> Entry | None:
        """See `ObjectStore`."""
        try:
            return self._retried("look for", name, lambda: self._entry(name))
        except MissingObjectError:
            return None

    def get(self, name: str) -> Object:
        """See `ObjectStore`."""

        def act() -> Object:
            entry = self._entry(name)
            return Object(name, entry.size, entry.version, self._range(name, 0, entry.size))

        return self._retried("read", name, act)

    def get_ranges(self, name: str, spans: Sequence[Span]) -> list[Data]:
        """See `ObjectStore`."""
        return self._retried("read", name, lambda: [self._range(name, *span) for span in spans])

    def put(self, name: str, data: Data | Path) -> str:
        """See `ObjectStore`."""
        return self._retried("write", name, lambda: self._put(name, data))

    def create(self, name: str, data: Data) -> str | None:
        """See `ObjectStore`."""
        return None if self.head(name) else self.put(name, data)

    def swap(self, name: str, data: Data, version: str) -> str | None:
        """See `ObjectStore`."""
        there = self.head(name)
        is_same = there is not None and there.version == version
        return self.put(name, data) if is_same else None

    def list(self, prefix: str = "") -> list[Entry]:
        """See `ObjectStore`."""
        folder = posixpath.join(self._root, prefix.rpartition("/")[0]).rstrip("/")

        def act() -> list[Entry]:
            self._fs.invalidate_cache()
            found = self._fs.find(folder, detail=True)
            names = {path.removeprefix(f"{self._root}/"): info for path, info in found.items()}
            for name in [name for name in names if name.endswith(_BEFORE)]:
                names.setdefault(name.removesuffix(_BEFORE), names.pop(name))
            return [_entry(name, info) for name, info in names.items() if name.startswith(prefix)]

        found = self._retried("list", prefix, act)
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, names: Iterable[str]) -> None:
        """See `ObjectStore`."""
        for name in names:
            for path in (self._path(name) + _BEFORE, self._path(name)):
                with contextlib.suppress(MissingObjectError):
                    self._retried("delete", name, functools.partial(self._fs.rm_file, path))

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def _entry(self, name: str) -> Entry:
        self._fs.invalidate_cache()
        return _entry(name, self._there(name, self._fs.info))

    def _range(self, name: str, start: int, stop: int) -> bytes:
        def read(path: str) -> bytes:
            data: bytes = self._fs.cat_file(path, start, stop) if start < stop else b""
            return data

        data = self._there(name, read)
        if len(data) != stop - start:
            raise Passing(f"got {len(data)} bytes, expected {stop - start}")
        return data

    def _there(self, name: str, act: Callable[[str], _T]) -> _T:
        """The result for an object; for the one before it, if a writer died between two moves."""
        path = self._path(name)
        try:
            return act(path)
        except FileNotFoundError:
            return act(path + _BEFORE)

    def _put(self, name: str, data: Data | Path) -> str:
        path = self._path(name)
        temporary = f"{path}.{secrets.token_hex(4)}.new"
        self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        try:
            if isinstance(data, Path):
                self._fs.put_file(str(data), temporary)
            else:
                self._fs.pipe_file(temporary, bytes(data))
            before = path + _BEFORE
            if self._fs.exists(path):
                # not every file system moves a file over another
                self._remove(before)
                self._fs.mv(path, before)
            self._fs.mv(temporary, path)
            self._remove(before)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise
        return self._entry(name).version

    def _remove(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm_file(path)

    def _retried(self, operation: str, name: str, act: Callable[[], _T]) -> _T:
        where = joined(self._url, name) if name else self._url

        def found(_: int) -> _T:
            try:
                return act()
            except FileNotFoundError:
                raise MissingObjectError(
                    f"{where}: could not {operation}: there is no such file"
                ) from None

        return retried(where, operation, self._limits, found, _explained)


def _explained(error: BaseException) -> Explanation:
    passes = isinstance(error, (ConnectionError, TimeoutError))
    return Explanation(shown(f"{type(error).__name__}: {error}".partition("\n")[0])[:300], passes)


def _filesystem(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(
            f"{url}: this needs fsspec, which is not installed; pip install 'fleetlight[storage]'"
        ) from error
    try:
        return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]
    except Exception as error:
        raise ConfigError(
            f"{url}: fsspec cannot open it: {shown(str(error).partition(chr(10))[0])[:300]}"
        ) from None


def _entry(name: str, info: Any) -> Entry:
    marks = (info.get(key) for key in ("ETag", "etag", "mtime", "modified", "created", "ino"))
    return Entry(name, info["size"], "-".join(str(one) for one in (*marks, info["size"])))


def _warn_once(url: str) -> None:
    scheme = url.partition("://")[0]
    if scheme not in _warned:
        _warned.add(scheme)
        _log.warning(
            "%s: this file system cannot refuse a second writer; let only one job write there", url
        )
