# SPDX-License-Identifier: Apache-2.0
"""`sources_of`: the files of names, folders, patterns and numbered names such as {000..099}."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import io
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetlight.data.locations.files import FoundFile, is_asked_for, is_data, local_sources
from fleetlight.errors import DataError
from fleetlight.store import Entry, ObjectStore, Span, is_url, store_at

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


#: files, folders and patterns, on this machine or under a URL
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def sources_of(paths: Paths, endings: Sequence[str]) -> list[FoundFile]:
    """The files of names, folders and patterns, each list sorted; `endings`: those in folders."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found: dict[str, FoundFile] = {}
    given_as: dict[str, str] = {}
    for one in given:
        for name, files in _found(os.fspath(one), endings):
            if not files:
                wanted = " or ".join(endings)
                if os.path.isdir(name):
                    raise DataError(f"got {name}: the folder has no file that ends with {wanted}")
                where = "" if is_url(name) else f" in {os.getcwd()}"
                raise DataError(
                    f"got {name}: no such file{where}; expected a file, a pattern such as day_*/, "
                    f"or a folder with files that end with {wanted}"
                )
            for file in files:
                place = file.name if is_url(name) else os.path.abspath(file.name)
                if place in found:
                    raise DataError(
                        f"{file.name}: got the file twice, by {given_as[place]!r} and by {name!r}; "
                        "name it once, since its records would count twice"
                    )
                found[place], given_as[place] = file, name
    if not found:
        raise DataError(f"got {given}, expected at least one file")
    return [*found.values()]


def _found(name: str, endings: Sequence[str]) -> Iterator[tuple[str, list[FoundFile]]]:
    """The files of each name that a name with braces stands for."""
    if is_url(name):
        for _, some in itertools.groupby(without_braces(name), _bucket_of):
            names = list(some)
            yield from zip(names, stored_sources(names, endings), strict=True)
        return
    for one in [name] if os.path.exists(name) else without_braces(name):
        yield one, local_sources(one, endings)


def _bucket_of(url: str) -> str:
    return "/".join(url.split("/")[:3])


def without_braces(name: str) -> Iterator[str]:
    """The names of one with {000..099} or {a,b}, in turn; a shell would expand it in this way."""
    texts = _BRACES.split(name)
    choices = [_choices(text, name) for text in texts[1::2]]
    for chosen in itertools.product(*choices):
        between = itertools.chain.from_iterable(zip(chosen, texts[2::2], strict=True))
        yield texts[0] + "".join(between)


def _choices(inside: str, name: str) -> Sequence[str]:
    found = _RANGE.fullmatch(inside)
    if found is None:
        if "," not in inside:
            raise DataError(
                f"got {name}: expected two whole numbers, as in {{000..099}}, got {{{inside}}}"
            )
        return inside.split(",")
    first, last = found.groups()
    if int(first) > int(last):
        raise DataError(
            f"got {name}: {first} is larger than {last}, expected the smaller one first"
        )
    width = len(first) if first.startswith("0") else 0
    return [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
