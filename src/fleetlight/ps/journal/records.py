# SPDX-License-Identifier: Apache-2.0
"""Records: the format of changes in a segment. Pure: bytes in, bytes out.

    seal     16 bytes    magic, checksum of the frame and the number, number of the record
    frame                the change and its arrays, as on the wire

Records follow each other and have consecutive numbers. After the last one the file ends, or has
the torn record of a killed writer. Whole records after anything else mean later damage.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ProtocolError
from fleetlight.kernels import checksum
from fleetlight.ps.transport.protocol import (
    PREFIX_BYTES,
    Array,
    MessageCodec,
    views,
)
from fleetlight.wire.plain import Buffer

M = TypeVar("M")

MAGIC = b"\xf1JNL"
#: magic, checksum, number
_SEAL = struct.Struct("<4sIQ")
_NUMBER = struct.Struct("<Q")
SEAL_BYTES = _SEAL.size
#: bytes that are searched at once for records after a gap
_SEARCH_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class LogRecord(Generic[M]):
    """A change, read from a segment."""

    number: int
    message: M
    arrays: list[Array]
    #: the offsets of this record and the next one
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Gap:
    """Bytes after the last valid record that are not a record."""

    at: int
    #: the reason
    why: str
    #: the number of a valid record after the gap; None: its writer was killed
    followed_by: int | None
    #: the file ends inside the record that begins here
    is_short: bool = False


class _TooShort(ProtocolError):
    """The file ends inside a record."""


class RecordBytes(Protocol):
    """Bytes in an array or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> NDArray[np.uint8]: ...


@dataclasses.dataclass(frozen=True)
class Framed:
    """An encoded change, except its number."""

    head: Buffer
    body: bytes
    checksum: int

    @property
    def nbytes(self) -> int:
        """The size of the record."""
        return SEAL_BYTES + len(self.head) + len(self.body)

    def sealed(self, number: int) -> list[Buffer]:
        """The buffers of the record, in order."""
        return [_SEAL.pack(MAGIC, _sealing(self.checksum, number), number), self.head, self.body]


def framed(codec: MessageCodec[M], message: M, arrays: Sequence[Array] = ()) -> Framed:
    """Encode a change; its arrays are copied, since applying the change may modify them."""
    head, *parts = codec.encode(0, message, arrays)
    body = b"".join(parts)
    return Framed(head, body, _checksum(head, body))


def _checksum(head: Buffer, body: bytes | NDArray[np.uint8]) -> int:
    """The checksum of a frame: prefix, header and arrays."""
    return zlib.crc32(head, checksum(body))


def _sealing(frame: int, number: int) -> int:
    return zlib.crc32(_NUMBER.pack(number), frame)


class RecordReader(Generic[M]):
    """Iterates over records; then `gap` describes bytes after the last one, if any."""

    def __init__(self, codec: MessageCodec[M], data: RecordBytes, first: int) -> None:
        self._codec = codec
        self._data = data
        self._number = first
        self.gap: Gap | None = None

    def __iter__(self) -> Iterator[LogRecord[M]]:
        at = 0
        while at < len(self._data):
            try:
                record = self._record(at)
                if record.number != self._number:
                    raise ProtocolError(f"record {record.number} lies where {self._number} should")
            except ProtocolError as error:
                is_short = isinstance(error, _TooShort)
                self.gap = Gap(at, str(error), self._behind(at + 1), is_short)
                return
            yield record
            at, self._number = record.stop, self._number + 1

    def _record(self, at: int) -> LogRecord[M]:
        data = self._data
        behind_seal = at + SEAL_BYTES
        start = behind_seal + PREFIX_BYTES
        if start > len(data):
            raise _TooShort(f"{len(data) - at} bytes are too few for a record")
        lead = data[at:start].tobytes()
        magic, expected, number = _SEAL.unpack_from(lead)
        if magic != MAGIC:
            raise ProtocolError("no record begins here")
        prefix = self._codec.prefix(lead[SEAL_BYTES:])
        body = start + prefix.header
        stop = body + prefix.body
        if stop > len(data):
            raise _TooShort(
                f"a record of {stop - at} bytes begins here, of which {len(data) - at} are there"
            )
        # separate slices, so that arrays are aligned for kernels
        header, arrays = data[start:body].tobytes(), data[body:stop]
        if _sealing(_checksum(lead[SEAL_BYTES:] + header, arrays), number) != expected:
            raise ProtocolError(f"record {number} does not fit its checksum")
        decoded = self._codec.decode_header(prefix, header)
        return LogRecord(number, decoded.message, views(decoded.places, arrays), at, stop)

    def _behind(self, at: int) -> int | None:
        """The number of the first valid record from an offset on."""
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
