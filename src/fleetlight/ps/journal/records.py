# SPDX-License-Identifier: Apache-2.0
"""Records: how changes lie in a journal's file. Pure: bytes in, bytes out.

    seal     16 bytes    magic, checksum of the frame and the number, number of the record
    frame                the change and its arrays, as on the wire

Records are numbered without gaps and lie one behind another. Where they end there is nothing, or
what a writer had begun when it died; whole records behind something else were damaged later.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ProtocolError
from fleetlight.kernels import checksum
from fleetlight.ps.transport.protocol import (
    PREFIX_BYTES,
    Array,
    Buffer,
    Codec,
    Prefix,
    views,
)

M = TypeVar("M")

MAGIC = b"\xf1JNL"
#: magic, checksum, number
_SEAL = struct.Struct("<4sIQ")
_NUMBER = struct.Struct("<Q")
SEAL_BYTES = _SEAL.size
#: how many bytes are looked through at once for records behind a gap
_SEARCH_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Record(Generic[M]):
    """A change that was written down."""

    number: int
    message: M
    arrays: list[Array]
    #: where it begins, and where the next one does
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Gap:
    """What is no record, behind those that are."""

    at: int
    #: what is wrong with it
    why: str
    #: the number of a whole record behind it; None: the writer died before it was done
    followed_by: int | None


@dataclasses.dataclass(frozen=True)
class Framed:
    """A change as it will lie in the file, but for its number."""

    frame: bytes
    checksum: int

    @property
    def nbytes(self) -> int:
        """How long the record will be."""
        return SEAL_BYTES + len(self.frame)

    def sealed(self, number: int) -> list[Buffer]:
        """The record, as buffers to be written in this order."""
        return [_SEAL.pack(MAGIC, _sealing(self.checksum, number), number), self.frame]


def framed(codec: Codec[M], message: M, arrays: Sequence[Array] = ()) -> Framed:
    """What takes time of making a record. Arrays are copied: who applies them may change them."""
    frame = b"".join(codec.encode(0, message, arrays))
    return Framed(frame, checksum(frame))


def _sealing(frame: int, number: int) -> int:
    return zlib.crc32(_NUMBER.pack(number), frame)


class Reader(Generic[M]):
    """Goes through a file's bytes; `gap` says what lies behind the last record, if anything."""

    def __init__(self, codec: Codec[M], data: NDArray[np.uint8], first: int) -> None:
        self._codec = codec
        self._data = data
        self._number = first
        self.gap: Gap | None = None

    def __iter__(self) -> Iterator[Record[M]]:
        at = 0
        while at < len(self._data):
            try:
                record = self._record(at)
                if record.number != self._number:
                    raise ProtocolError(f"record {record.number} lies where {self._number} should")
            except ProtocolError as error:
                self.gap = Gap(at, str(error), self._behind(at + 1))
                return
            yield record
            at, self._number = record.stop, self._number + 1

    def _record(self, at: int) -> Record[M]:
        data = self._data
        behind_seal = at + SEAL_BYTES
        if behind_seal + PREFIX_BYTES > len(data):
            raise ProtocolError(f"{len(data) - at} bytes are too few for a record")
        magic, expected, number = _SEAL.unpack_from(data.data, at)
        if magic != MAGIC:
            raise ProtocolError("no record begins here")
        start = behind_seal + PREFIX_BYTES
        prefix = Prefix.parse(data[behind_seal:start].tobytes(), self._codec.body_limit)
        stop = start + prefix.header + prefix.body
        if stop > len(data):
            raise ProtocolError(
                f"a record of {stop - at} bytes begins here, of which {len(data) - at} are there"
            )
        if _sealing(checksum(data[behind_seal:stop]), number) != expected:
            raise ProtocolError(f"record {number} does not fit its checksum")
        body = start + prefix.header
        header = self._codec.decode_header(prefix, data[start:body].tobytes())
        return Record(number, header.message, views(header.places, data[body:stop]), at, stop)

    def _behind(self, at: int) -> int | None:
        """The number of the first whole record from there on."""
        while at < len(self._data):
            part = self._data[at : at + _SEARCH_BYTES + len(MAGIC) - 1].tobytes()
            found = part.find(MAGIC)
            if found < 0:
                at += _SEARCH_BYTES
                continue
            try:
                return self._record(at + found).number
            except ProtocolError:
                at += found + 1
        return None
