# SPDX-License-Identifier: Apache-2.0
"""`BucketFile`: a file in a bucket, of which ranges are read."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import io
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fleetlight.data.locations.files import FoundFile, is_asked_for, is_data
from fleetlight.errors import DataError
from fleetlight.store import Entry, ObjectStore, Span, store_at

#: the least that is read at once; Arrow asks for a footer in pieces
_MIN_READ_BYTES = 1 << 16
_WILD = "*?["


@dataclasses.dataclass(frozen=True)
class BucketFile(FoundFile):
    """An object of a store."""

    #: of the bucket
    url: str
    entry: Entry

    def open(self) -> Any:
        return _Ranges(self)

    def read(self, spans: Sequence[Span]) -> list[memoryview]:
        return [memoryview(data) for data in self.store.get_ranges(self.entry.name, spans)]

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
        tail = max(0, source.size - _MIN_READ_BYTES)
        if first >= tail:
            self._first, self._data = tail, _tail(source, tail, os.getpid())
            return
        stop = min(source.size, first + max(size, _MIN_READ_BYTES))
        self._first, [self._data] = first, source.read([(first, stop)])


@functools.lru_cache(maxsize=256)
def _tail(source: BucketFile, first: int, process: int) -> memoryview:
    """The end of an object, where its footer is; each row group needs it again."""
    [data] = source.read([(first, source.size)])
    return data


def stored_sources(urls: Sequence[str], endings: Sequence[str]) -> list[list[FoundFile]]:
    """The objects of each URL, or pattern, or everything under it, by name; all in one bucket."""
    scheme, _, path = urls[0].partition("://")
    root = f"{scheme}://{path.partition('/')[0]}"
    paths = [url[len(root) :].strip("/") for url in urls]
    files: dict[str, FoundFile] = {
        one.name: BucketFile(f"{root}/{one.name}", one.size, one.version, root, one)
        for one in _bucket(root, os.getpid()).list(_common([*map(_fixed, paths)]))
    }
    return [_matching(path.split("/"), files, endings) for path in paths]


def _common(texts: Sequence[str]) -> str:
    """How all texts begin."""
    first, last = min(texts), max(texts)
    return first[: next((n for n, one in enumerate(first) if one != last[n]), len(first))]


def _fixed(path: str) -> str:
    """A pattern before the first character that is not fixed."""
    return "".join(itertools.takewhile(lambda one: one not in _WILD, path))


def _matching(
    pattern: Sequence[str], files: Mapping[str, FoundFile], endings: Sequence[str]
) -> list[FoundFile]:
    exact = files.get("/".join(pattern))
    if exact is not None:
        return [exact]
    return [file for name, file in files.items() if _fits(name.split("/"), pattern, endings)]


def _fits(name: Sequence[str], pattern: Sequence[str], endings: Sequence[str]) -> bool:
    """True for an object that a pattern names, or one in a folder that it names."""
    if pattern == [""]:
        pattern = []
    if len(name) < len(pattern):
        return False
    if not all(map(fnmatch.fnmatchcase, name, pattern)) or not is_asked_for(name, pattern):
        return False
    inside = name[len(pattern) :]
    return not inside or is_data(inside, endings)


@functools.lru_cache(maxsize=16)
def _bucket(url: str, process: int) -> ObjectStore:
    """The store of a bucket; the threads of a store end in a forked process."""
    return store_at(url)
