# SPDX-License-Identifier: Apache-2.0
"""`BucketFile`: a file in a bucket, of which Arrow reads the ranges that it needs."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import io
import os
from collections.abc import Sequence
from typing import Any

from fleetlight.data.columns import arrow
from fleetlight.data.columns.files.sources import FoundFile, is_data
from fleetlight.errors import DataError
from fleetlight.store import Entry, ObjectStore, store_at

#: the least that is read at once; Arrow asks for a footer in pieces
_LEAST = 1 << 16
_WILD = "*?["


@dataclasses.dataclass(frozen=True)
class BucketFile(FoundFile):
    """An object of a store."""

    #: of the bucket
    url: str
    entry: Entry

    def open(self) -> Any:
        return arrow().PythonFile(_Ranges(self), mode="r")

    def current(self) -> FoundFile:
        now = self.store.head(self.entry.name)
        if now is None:
            raise DataError(f"{self.name}: the object has been deleted since the job began")
        return dataclasses.replace(self, size=now.size, version=now.version)

    @property
    def store(self) -> ObjectStore:
        """The bucket, opened once by each process."""
        return _bucket(self.url, os.getpid())


class _Ranges(io.RawIOBase):
    """Reads an object at any place."""

    def __init__(self, source: BucketFile) -> None:
        self._source, self._at = source, 0
        #: what was read last, and where it begins
        self._first, self._data = 0, memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._source.size - self._at)
        size = left if size < 0 else min(size, left)
        if not size:
            return b""
        start = self._at - self._first
        if start < 0 or start + size > len(self._data):
            self._load(size)
            start = self._at - self._first
        self._at += size
        return bytes(self._data[start : start + size])

    def _load(self, size: int) -> None:
        source, first = self._source, self._at
        tail = max(0, source.size - _LEAST)
        if first >= tail:
            self._first, self._data = tail, _tail(source, tail, os.getpid())
            return
        stop = min(source.size, first + max(size, _LEAST))
        self._first, self._data = first, _range(source, first, stop)


def _range(source: BucketFile, first: int, stop: int) -> memoryview:
    [data] = source.store.get_ranges(source.entry.name, [(first, stop)])
    return memoryview(data)


@functools.lru_cache(maxsize=256)
def _tail(source: BucketFile, first: int, process: int) -> memoryview:
    """The end of an object, where its footer is; each row group needs it again."""
    return _range(source, first, source.size)


def stored_sources(url: str, endings: Sequence[str]) -> list[FoundFile]:
    """The objects of a URL, a pattern, or everything under it, by name."""
    scheme, _, path = url.partition("://")
    bucket, _, path = path.partition("/")
    root, pattern = f"{scheme}://{bucket}", path.strip("/").split("/")
    fixed = next((n for n, part in enumerate(pattern) if set(part) & set(_WILD)), len(pattern))
    entries = _bucket(root, os.getpid()).list("/".join(pattern[:fixed]))
    return [
        BucketFile(f"{root}/{entry.name}", entry.size, entry.version, root, entry)
        for entry in entries
        if _fits(entry.name.split("/"), pattern, endings)
    ]


def _fits(name: Sequence[str], pattern: Sequence[str], endings: Sequence[str]) -> bool:
    """True for an object that a pattern names, or one in a folder that it names."""
    if pattern == [""]:
        pattern = []
    if len(name) < len(pattern):
        return False
    if not all(map(fnmatch.fnmatchcase, name, pattern)):
        return False
    inside = name[len(pattern) :]
    return not inside or is_data(inside, endings)


@functools.lru_cache(maxsize=16)
def _bucket(url: str, process: int) -> ObjectStore:
    """The store of a bucket; the threads of a store end in a forked process."""
    return store_at(url)
