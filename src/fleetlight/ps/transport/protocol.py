# SPDX-License-Identifier: Apache-2.0
"""Frames: the wire format of a message and its arrays. Pure: bytes in, bytes out, no sockets.

    prefix   24 bytes    magic, version, slot, length of the header, length of the body, checksum
    header   msgpack     number of the request, the message, dtype and shape of each array
    body     raw bytes   the arrays one after another, each at a multiple of 8

A slot other than 0 says that the body is not on the wire but in memory that both ends share.

All numbers are little-endian. The magic and the version never move, so that two versions can name
each other. Any bytes decode to a frame or raise a `ProtocolError`, and the lengths are compared
with the limits before memory is allocated.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import PlanError, ProtocolError
from fleetlight.wire.plain import Buffer

M = TypeVar("M")
Array = NDArray[Any]

MAGIC = b"\xf1EET"
VERSION = 1
HEADER_LIMIT = 4 << 20
#: for files, which only this project writes
FILE_HEADER_LIMIT = 1 << 30
BODY_LIMIT = 8 << 30
ARRAY_LIMIT = 1 << 16
ALIGNMENT = 8

#: NumPy has no bfloat16; its bits travel as uint16, which no other type uses
BFLOAT16: np.dtype[Any] = np.dtype("<u2")
DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype("?"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint64": np.dtype("<u8"),
    "float16": np.dtype("<f2"),
    "bfloat16": BFLOAT16,
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PADDING = bytes(ALIGNMENT)

#: magic, version, slot, bytes of the header, bytes of the body; the checksum of these follows
_LENGTHS = struct.Struct("<4sHHIQ")
_PREFIX = struct.Struct("<4sHHIQI")
PREFIX_BYTES = _PREFIX.size

#: first bytes of other protocols
_STRANGERS = {
    b"\x16\x03": "a TLS hello; one side uses ssl and the other does not",
    b"\x15\x03": "a TLS alert; one side uses ssl and the other does not",
    b"HTTP/": "an HTTP answer",
    b"SSH-": "an SSH hello",
    **{verb + b" ": "an HTTP request" for verb in (b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS")},
}

_Dimension = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_DtypeName = Literal[
    "bool", "uint8", "int32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"
]


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """An array as the header describes it."""

    dtype: _DtypeName
    shape: Annotated[tuple[_Dimension, ...], msgspec.Meta(max_length=8)]


class Envelope(msgspec.Struct, Generic[M], frozen=True, array_like=True):
    """The header of a frame."""

    request: Annotated[int, msgspec.Meta(ge=0)]
    message: M
    arrays: Annotated[tuple[ArraySpec, ...], msgspec.Meta(max_length=ARRAY_LIMIT)]


class Prefix(NamedTuple):
    """The lengths of the two parts that follow the prefix of a frame."""

    header: int
    body: int
    #: where the body is in shared memory; 0: it follows the header
    slot: int = 0

    def pack(self) -> bytes:
        """The first bytes of a frame."""
        lengths = _LENGTHS.pack(MAGIC, VERSION, self.slot, self.header, self.body)
        return lengths + _checksum(lengths).to_bytes(4, "little")

    @classmethod
    def parse(
        cls, data: bytes, body_limit: int = BODY_LIMIT, header_limit: int = HEADER_LIMIT
    ) -> Prefix:
        """Decode and check the first bytes of a frame."""
        if len(data) == PREFIX_BYTES:
            magic, version, slot, header, body, checksum = _PREFIX.unpack(data)
            is_known = magic == MAGIC and version == VERSION and checksum == _checksum(data)
            if is_known and header <= header_limit and body <= body_limit:
                return cls(header, body, slot)
        raise _refusal(data, body_limit, header_limit)


def _checksum(data: bytes) -> int:
    return zlib.crc32(data[: _LENGTHS.size])


def _refusal(data: bytes, body_limit: int, header_limit: int) -> ProtocolError:
    """The error for bytes that are no prefix."""
    check_start(data)
    if len(data) != PREFIX_BYTES:
        return ProtocolError(f"a frame ended after {len(data)} of its first {PREFIX_BYTES} bytes")
    _, _, _, header, body, checksum = _PREFIX.unpack(data)
    if checksum != _checksum(data):
        return ProtocolError("the first bytes of a frame do not fit their checksum")
    what, size, limit = ("header", header, header_limit)
    if header <= header_limit:
        what, size, limit = ("body", body, body_limit)
    return ProtocolError(f"a frame has a {what} of {size} bytes; at most {limit} are taken")


def check_start(data: bytes) -> None:
    """Refuse bytes that cannot start a frame, as early as possible."""
    if not data.startswith(MAGIC[: len(data)]):
        raise ProtocolError(f"expected a Fleetlight frame, got {_described(data)}")
    if len(data) >= 6:
        (version,) = struct.unpack_from("<H", data, len(MAGIC))
        if version != VERSION:
            raise ProtocolError(
                f"the other side speaks version {version} of the protocol, this one speaks "
                f"{VERSION}; install the same version of fleetlight everywhere"
            )


def _described(data: bytes) -> str:
    for start, name in _STRANGERS.items():
        if data.startswith(start):
            return name
    return f"bytes that start with {data[:8]!r}"


class ArrayLocation(NamedTuple):
    """Position of an array in the body."""

    offset: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class Header(Generic[M]):
    """The decoded header of a frame."""

    request: int
    message: M
    places: tuple[ArrayLocation, ...]


class MessageCodec(Generic[M]):
    """Encodes messages of one tagged union as frames, and decodes them."""

    def __init__(
        self, union: Any, body_limit: int = BODY_LIMIT, header_limit: int = HEADER_LIMIT
    ) -> None:
        self.body_limit, self.header_limit = body_limit, header_limit
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Envelope[M]]
        self._decoder = msgspec.msgpack.Decoder(Envelope[union])

    def encode(
        self,
        request: int,
        message: M,
        arrays: Sequence[Array] = (),
        into_slot: Callable[[Sequence[Buffer], int], int] | None = None,
    ) -> list[Buffer]:
        """Encode a frame as buffers in send order, without copying arrays.

        `into_slot` may copy the body of the given size into shared memory; it returns the slot.
        """
        specs = tuple(_spec(number, array) for number, array in enumerate(arrays))
        body, size = _laid_out(arrays)
        header = self._encoder.encode(Envelope(request, message, specs))
        if len(specs) > ARRAY_LIMIT or len(header) > self.header_limit or size > self.body_limit:
            raise self._refusal(len(specs), len(header), size)
        slot = into_slot(body, size) if into_slot is not None and body else 0
        start = Prefix(len(header), size, slot).pack() + header
        return [start] if slot else [start, *body]

    def prefix(self, data: bytes) -> Prefix:
        """The prefix of a frame; raise when a part exceeds its limit."""
        return Prefix.parse(data, self.body_limit, self.header_limit)

    def _refusal(self, arrays: int, header: int, body: int) -> PlanError:
        what = (
            ("arrays", arrays, ARRAY_LIMIT),
            ("bytes of header", header, self.header_limit),
            ("bytes of arrays", body, self.body_limit),
        )
        name, size, limit = next(each for each in what if each[1] > each[2])
        return PlanError(f"a message has {size} {name}, and at most {limit} fit into one frame")

    def decode_header(self, prefix: Prefix, data: bytes | bytearray | memoryview) -> Header[M]:
        """Decode a header and check it against the length of the body."""
        if len(data) != prefix.header:
            raise ProtocolError(f"a header ended after {len(data)} of {prefix.header} bytes")
        try:
            envelope = self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ProtocolError(f"the header of a frame makes no sense: {error}") from None
        places, size = _places(envelope.arrays)
        if size != prefix.body:
            raise ProtocolError(
                f"a frame has a body of {prefix.body} bytes, but its arrays need {size}"
            )
        return Header(envelope.request, envelope.message, places)


def views(places: Iterable[ArrayLocation], body: NDArray[np.uint8]) -> list[Array]:
    """The arrays of a frame as views of its receive buffer."""
    return [np.ndarray(place.shape, place.dtype, body, place.offset) for place in places]


def _spec(number: int, array: Array) -> ArraySpec:
    name = _NAMES.get(array.dtype)
    if name is None or array.ndim > 8:
        raise PlanError(
            f"array {number} of a message is {array.ndim}-dimensional {array.dtype}, expected at "
            f"most 8 dimensions and one of {', '.join(DTYPES)}"
        )
    return ArraySpec(cast(_DtypeName, name), array.shape)


def _laid_out(arrays: Iterable[Array]) -> tuple[list[Buffer], int]:
    """The buffers of the arrays with padding, and their total size."""
    parts: list[Buffer] = []
    size = 0
    for array in arrays:
        nbytes = array.nbytes
        if not nbytes:
            continue
        if gap := -size % ALIGNMENT:
            parts.append(_PADDING[:gap])
        whole = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        parts.append(whole.reshape(-1).view(np.uint8).data)
        size += gap + nbytes
    return parts, size


def _places(specs: Iterable[ArraySpec]) -> tuple[tuple[ArrayLocation, ...], int]:
    """The position of each array, and the length of the body, as laid out by `_laid_out`."""
    places, end = [], 0
    for spec in specs:
        dtype, shape = DTYPES[spec.dtype], spec.shape
        count = math.prod(shape)
        # a length of 0 hides lengths that no array can have
        if (count > 1 << 50 or not count) and math.prod(max(1, n) for n in shape) > 1 << 50:
            raise ProtocolError(f"a frame announces an array of shape {shape}")
        nbytes = count * dtype.itemsize
        offset = end + -end % ALIGNMENT if nbytes else 0
        places.append(ArrayLocation(offset, nbytes, dtype, shape))
        end = offset + nbytes if nbytes else end
    return tuple(places), end
