# SPDX-License-Identifier: Apache-2.0
"""`CommitLog`: logs the pushes of a step before they are sent.

Two files alternate, so that one is complete whenever the worker dies. Both survive the process,
and with `sync` the machine. The head of a file is written last, so after a process failure it
proves that the rest is complete; after a machine failure the checksum does.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import JournalError
from fleetlight.ps.journal.disk_full_retry import once_there_is_room, written
from fleetlight.ps.messages import Apply, GeoExchange, Push
from fleetlight.ps.transport.protocol import (
    FILE_HEADER_LIMIT,
    PREFIX_BYTES,
    MessageCodec,
    views,
)
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal
from fleetlight.wire.plain import Buffer, unsent

Array = NDArray[Any]
Request = tuple[Any, Sequence[Array]]

#: magic, number of the commit, bytes of the frames, their checksum; then the checksum of the head
_HEAD, _CHECKSUM = struct.Struct("<8sQQI"), struct.Struct("<I")
_MAGIC = b"\xf1REDO\x00\x00\x01"
_HEAD_BYTES = _HEAD.size + _CHECKSUM.size
_BUFFERS = 1024


class ResumePoint(msgspec.Struct, frozen=True):
    """The position of a worker in its script when it makes a step."""

    #: logged calls and barriers when the loader returned the batch; calls before the first batch
    replies: int
    meetings: int
    prelude: int
    #: the encoded state of the script
    script: bytes
    #: counters of the communicator
    phase: int = 0
    steps: int = 0
    before: int = 0
    #: number of the point, and its blobs
    number: int = 0
    kept: list[str] = []
    #: why no restart can resume here; it must not resume at an earlier point either
    why_not: str = ""


class Commit(msgspec.Struct, frozen=True, tag=True):
    """The head of a logged step; its requests follow, one frame each."""

    resume_point: ResumePoint
    epoch: int
    #: by server: the number of its last request
    sequences: list[int]
    #: the server of each request
    servers: list[int]
    #: control signals received before this step
    called: ControlSignal = NO_SIGNAL
    #: by server: the last push acknowledged before this step
    acknowledged: list[int] = []


@dataclasses.dataclass(frozen=True)
class Committed:
    """A logged step, read back."""

    commit: Commit
    requests: Mapping[int, Sequence[Request]]


class CommitLog:
    """Used by the thread that pushes, one step at a time."""

    def __init__(self, folder: Path, patience_s: float, *, sync: bool = False) -> None:
        """`sync`: fsync each commit."""
        self._patience_s, self._sync = patience_s, sync
        self._codec: MessageCodec[Any] = MessageCodec(
            Commit | Push | Apply | GeoExchange, header_limit=FILE_HEADER_LIMIT
        )
        self._paths = [folder / f"push.{n}" for n in range(2)]
        found = [self._read(path) for path in self._paths]
        newest = max(
            (one for one in found if one is not None), key=lambda one: one[0], default=None
        )
        #: the last commit of an earlier incarnation
        self.last: Committed | None = None if newest is None else newest[1]
        self._count = 0 if newest is None else newest[0]
        self._files = [opened(path, patience_s) for path in self._paths]

    @property
    def has_any(self) -> bool:
        """True once any incarnation has committed a step."""
        return self._count > 0

    def write(self, commit: Commit, requests: Sequence[Request]) -> None:
        """Write a commit; return once it survives the end of this process."""
        self._count += 1
        frames: list[Buffer] = []
        for message, arrays in [(commit, ()), *requests]:
            frames += self._codec.encode(0, message, arrays)
        sum_ = functools.reduce(lambda known, part: zlib.crc32(part, known), frames, 0)
        head = _HEAD.pack(_MAGIC, self._count, sum(map(len, frames)), sum_)
        self._put([bytes(_HEAD_BYTES), *frames])
        self._put([head + _CHECKSUM.pack(zlib.crc32(head))], sync=self._sync)

    def _put(self, buffers: Sequence[Buffer], *, sync: bool = False) -> None:
        number = self._count % 2
        path, file = self._paths[number], self._files[number]
        patiently(path, file, buffers, 0, self._patience_s, sync=sync)

    def close(self) -> None:
        """Close the files."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()

    def _read(self, path: Path) -> tuple[int, Committed] | None:
        """Read a file; None when it is missing or incomplete."""
        try:
            data = np.fromfile(path, np.uint8)
        except FileNotFoundError:
            return None
        head = data[: _HEAD.size].tobytes()
        sealed = head + _CHECKSUM.pack(zlib.crc32(head))
        if len(data) < _HEAD_BYTES or data[:_HEAD_BYTES].tobytes() != sealed:
            return None
        magic, count, size, sum_ = _HEAD.unpack(head)
        frames = data[_HEAD_BYTES : _HEAD_BYTES + size]
        if magic != _MAGIC or size > len(frames) or zlib.crc32(frames.data) != sum_:
            return None
        return count, self._committed(frames)

    def _committed(self, data: NDArray[np.uint8]) -> Committed:
        commit, _, at = self._frame(data, 0)
        requests: dict[int, list[Request]] = {}
        for server in commit.servers:
            message, arrays, at = self._frame(data, at)
            requests.setdefault(server, []).append((message, arrays))
        return Committed(commit, requests)

    def _frame(self, data: NDArray[np.uint8], at: int) -> tuple[Any, list[Array], int]:
        """Decode the frame at an offset; return it and the offset of the next one."""
        start = at + PREFIX_BYTES
        prefix = self._codec.prefix(data[at:start].tobytes())
        body = start + prefix.header
        header = self._codec.decode_header(prefix, data[start:body].tobytes())
        return header.message, views(header.places, data[body:]), body + prefix.body


def opened(path: Path, patience_s: float, flags: int = 0) -> int:
    """Open or create a file; wait while the disk is full."""
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    return written(path, lambda: os.open(path, flags, 0o600), patience_s)


def patiently(
    path: Path,
    fd: int,
    buffers: Sequence[Buffer],
    at: int,
    patience_s: float,
    *,
    sync: bool = False,
) -> None:
    """Write at an offset of a file; wait while the disk is full. `sync`: fsync it."""
    try:
        once_there_is_room(path, lambda: _overwrite(fd, buffers, at), patience_s)
        if sync:
            os.fdatasync(fd)
    except OSError as error:
        raise JournalError(
            f"durability: {path} cannot be written: {error.strerror}; this worker could not resume "
            "at its last step after a restart"
        ) from error


def _overwrite(fd: int, buffers: Sequence[Buffer], at: int) -> None:
    rest = [memoryview(part).cast("B") for part in buffers if len(part)]
    while rest:
        done = os.pwritev(fd, rest[:_BUFFERS], at)
        at, rest = at + done, unsent(rest, done)
