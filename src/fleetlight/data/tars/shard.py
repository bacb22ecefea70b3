# SPDX-License-Identifier: Apache-2.0
"""`TarShard`: where the samples of a tar are, found by reading its headers once.

Members that follow each other and share a key are a sample. The index may be kept in a folder, so
that no later job reads the headers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from fleetlight.data.locations.files import FoundFile, LocalFile
from fleetlight.data.tars.members import members
from fleetlight.errors import DataError, MissingObjectError
from fleetlight.kernels.arrays import Ids
from fleetlight.store import ObjectStore

#: bytes that are read at once while headers are read: members of this machine's files are skipped,
#: a bucket replies to a request as late as to a larger one
_LOCAL_READ, _BUCKET_READ = 1 << 14, 8 << 20
#: bytes of a group, about
GROUP_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class TarShard:
    """A tar, and the bytes at which its samples begin."""

    file: FoundFile
    #: of each sample, and where the last one ends
    starts: Ids

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return len(self.starts) - 1

    def groups(self) -> Iterator[tuple[int, int]]:
        """Samples that are read together: the first, and the one after the last."""
        first = 0
        while first < self.samples:
            reach = self.starts[first] + GROUP_BYTES
            last = int(np.searchsorted(self.starts, reach, "right")) - 1
            yield first, max(first + 1, last)
            first = max(first + 1, last)

    @classmethod
    def at(cls, file: FoundFile, kept: ObjectStore | None) -> TarShard:
        """Find the samples; `kept`: where indices are kept, and written if there is none."""
        name = "" if kept is None else _index_name(file)
        starts = None if kept is None else _read_index(kept, name, file)
        if starts is None:
            starts = np.array(_starts(file), np.int64)
            if kept is not None:
                kept.put(name, _index_bytes(starts))
        return cls(file, starts)


def key_of(member: str) -> tuple[str, str] | None:
    """The key and the extension; None for a file that belongs to no sample.

    The extension of "train/12.seg.png" is "seg.png", the key "train/12".
    """
    folder, slash, base = member.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot or (stem.startswith("__") and stem.endswith("__")):
        return None
    return folder + slash + stem, extension.lower()


def _starts(file: FoundFile) -> list[int]:
    """Where the samples begin, and where the last one ends."""
    starts: list[int] = []
    keys: dict[str, int] = {}
    last, end = None, 0
    with file.open() as opened:
        read = _Chunks(opened, _LOCAL_READ if isinstance(file, LocalFile) else _BUCKET_READ)
        for member in members(read, 0, file.size, file.name, is_whole=True):
            found = key_of(member.name)
            if found is None:
                continue
            key, _ = found
            if key != last:
                if key in keys:
                    raise DataError(
                        f"{file.name}, member {member.name!r}: the key {key!r} has members at "
                        f"byte {keys[key]} already, with others between; write the members of a "
                        "sample one after another, and give each sample a key of its own"
                    )
                keys[key] = member.header
                starts.append(member.header)
                last = key
            end = member.end
    return [*starts, end]


class _Chunks:
    """Reads a file at rising places, a chunk at a time."""

    def __init__(self, file: Any, chunk: int) -> None:
        self._file, self._chunk = file, chunk
        self._first, self._data = 0, b""

    def __call__(self, at: int, size: int) -> bytes:
        if at + size > self._first + len(self._data):
            self._file.seek(at)
            self._first, self._data = at, self._file.read(max(size, self._chunk))
        return self._data[at - self._first : at - self._first + size]


def _index_name(file: FoundFile) -> str:
    """Another one for each version of a tar."""
    facts = repr((file.name, file.size, file.version))
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return f"{file.name.rsplit('/', 1)[-1]}.{digest}.index.npy"


def _index_bytes(starts: Ids) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, starts.astype("<i8"), allow_pickle=False)
    return file.getvalue()


def _read_index(kept: ObjectStore, name: str, file: FoundFile) -> Ids | None:
    """The index of a tar; None where there is none."""
    try:
        data = kept.get(name).data
    except MissingObjectError:
        return None
    try:
        starts = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        is_sound = starts.ndim == 1 and len(starts) and starts.dtype == np.int64
        if is_sound and (np.diff(starts) > 0).all() and starts[-1] <= file.size:
            return starts
    except ValueError:
        pass
    raise DataError(f"{kept.url}/{name}: got a file that is no index of {file.name}; delete it")
