# SPDX-License-Identifier: Apache-2.0
"""`FoundFile`: a file as it was when it was listed; `LocalFile` is on this machine."""

from __future__ import annotations

import abc
import dataclasses
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import unquote

from fleetlight.errors import DataError
from fleetlight.store import Span

T = TypeVar("T")
R = TypeVar("R")

#: the folder that Hive, Spark and Arrow write for a missing value
_MISSING = "__HIVE_DEFAULT_PARTITION__"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclasses.dataclass(frozen=True)
class FoundFile(abc.ABC):
    """A file, and what it looked like when it was listed."""

    name: str
    size: int
    #: changes with the contents
    version: str

    @abc.abstractmethod
    def open(self) -> Any:
        """A binary file object."""

    @abc.abstractmethod
    def read(self, spans: Sequence[Span]) -> list[memoryview]:
        """These ranges of the file, at once."""

    @abc.abstractmethod
    def current(self) -> FoundFile:
        """The file as it is now."""

    def check_unchanged(self) -> None:
        """DataError if the file is another one than when it was listed."""
        now = self.current()
        if (now.size, now.version) != (self.size, self.version):
            raise DataError(
                f"{self.name}: the file has changed since the job began (it had {self.size} bytes, "
                f"now {now.size}); write new data into new files"
            )

    @property
    def partition(self) -> dict[str, str | None]:
        """Values in the names of its folders, such as day=2026-11-20 or city=New%20York."""
        folders = self.name.replace(os.sep, "/").split("/")[:-1]
        pairs = (folder.split("=", 1) for folder in folders if "=" in folder)
        return {name: None if value == _MISSING else unquote(value) for name, value in pairs}


class LocalFile(FoundFile):
    """A file on this machine."""

    @classmethod
    def at(cls, name: str) -> LocalFile:
        """The file of this name."""
        found = os.stat(name)
        return cls(name, found.st_size, str(found.st_mtime_ns))

    def open(self) -> Any:
        return open(self.name, "rb", buffering=0)

    def read(self, spans: Sequence[Span]) -> list[memoryview]:
        with open(self.name, "rb", buffering=0) as file:
            return [_range(file.fileno(), *span) for span in spans]

    def current(self) -> FoundFile:
        return LocalFile.at(self.name)


def _range(file: int, start: int, stop: int) -> memoryview:
    """The bytes of a range; fewer where the file ends."""
    data = memoryview(bytearray(stop - start))
    done = 0
    # one call reads 2 GiB at most
    while read := os.preadv(file, [data[done:]], start + done):
        done += read
    return data[:done]


def check_plain(start: bytes, where: str) -> None:
    """DataError for a file that begins like a compressed one, of which no part can be read."""
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{where}: got a file compressed with {name}, of which no part can be read on its "
                "own; decompress it"
            )


def local_sources(name: str, endings: Sequence[str]) -> list[FoundFile]:
    """The files of a name, a folder or a pattern, sorted."""
    found = [name]
    if not os.path.exists(name):
        wanted = name.split(os.sep)
        found = sorted(one for one in glob.glob(name) if is_asked_for(one.split(os.sep), wanted))
    files: list[str] = []
    for one in found:
        files += sorted(_inside(one, endings)) if os.path.isdir(one) else [one]
    return [LocalFile.at(one) for one in files]


def _inside(folder: str, endings: Sequence[str]) -> Iterator[str]:
    """The files of a folder and its folders; tools leave hidden ones there, such as _SUCCESS."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "_")))
        yield from (os.path.join(path, file) for file in files if is_data([file], endings))


def is_data(parts: Sequence[str], endings: Sequence[str]) -> bool:
    """False for what tools leave in a folder, such as _SUCCESS; `parts`: names of folders, file."""
    return parts[-1].endswith(tuple(endings)) and not any(
        part.startswith((".", "_")) for part in parts
    )


def is_asked_for(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """False where `*` stands for what tools leave beside data, such as the folder _temporary."""
    return not any(
        part != wanted and part[:1] in ("_", ".") and wanted[:1] != part[:1]
        for part, wanted in zip(parts, pattern, strict=False)
    )


def in_threads(act: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """The results for each item; one item needs no thread."""
    if len(items) <= 1:
        return [act(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(act, items))
