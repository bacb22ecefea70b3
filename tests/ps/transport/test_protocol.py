# SPDX-License-Identifier: Apache-2.0
"""Protocol: any bytes are a frame or raise a ProtocolError."""

import contextlib
import tracemalloc
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fleetlight.errors import PeerError, PlanError, ProtocolError
from fleetlight.ps.messages import Failure, Message, MetricsRequest, Pull, Push, TablePull
from fleetlight.ps.transport.protocol import (
    ALIGNMENT,
    ARRAY_LIMIT,
    DTYPES,
    HEADER_LIMIT,
    MAGIC,
    PREFIX_BYTES,
    VERSION,
    Array,
    MessageCodec,
    Prefix,
    check_start,
    views,
)
from fleetlight.wire.plain import unsent

CODEC: MessageCodec[Message] = MessageCodec(Message)
PULL = Pull([TablePull(0, True), TablePull(3, False)], dense=True, at_least=5)


def encoded(message: Message, arrays: list[Array], request: int = 1) -> bytes:
    return b"".join(CODEC.encode(request, message, arrays))


def decoded(data: bytes, codec: MessageCodec[Any] = CODEC) -> tuple[int, Message, list[Array]]:
    prefix = Prefix.parse(data[:PREFIX_BYTES], codec.body_limit)
    split = PREFIX_BYTES + prefix.header
    header = codec.decode_header(prefix, data[PREFIX_BYTES:split])
    body = np.frombuffer(data[split:], np.uint8)
    assert len(body) == prefix.body
    return header.request, header.message, views(header.places, body)


def with_header(header: bytes, body: int = 0) -> bytes:
    return Prefix(len(header), body).pack() + header


def raw(*fields: Any) -> bytes:
    return with_header(msgspec.msgpack.encode(fields))


def some_arrays() -> st.SearchStrategy[list[Array]]:
    shapes = arrays_of.array_shapes(min_dims=0, min_side=0, max_side=5)
    array = st.sampled_from(list(DTYPES.values())).flatmap(
        lambda dtype: arrays_of.arrays(dtype, shapes)
    )
    return st.lists(array, max_size=5)


@given(some_arrays(), st.integers(0, 2**63))
def test_a_frame_round_trips(arrays: list[Array], request: int) -> None:
    got_request, message, got_arrays = decoded(encoded(PULL, arrays, request))
    assert (got_request, message) == (request, PULL)
    for sent, got in zip(arrays, got_arrays, strict=True):
        assert (sent.dtype, sent.shape, sent.tobytes()) == (got.dtype, got.shape, got.tobytes())


def test_bfloat16_is_sent_as_its_bits() -> None:
    bits = np.array([[1, 2], [3, 4]], np.uint16)
    _, _, (got,) = decoded(encoded(MetricsRequest(), [bits]))
    assert got.dtype == DTYPES["bfloat16"] == np.uint16
    np.testing.assert_array_equal(got, bits)


def test_a_noncontiguous_array_arrives_contiguous() -> None:
    transposed = np.arange(6.0).reshape(2, 3).T
    _, _, (got,) = decoded(encoded(MetricsRequest(), [transposed]))
    np.testing.assert_array_equal(got, transposed)


def test_arrays_are_not_copied_and_stay_aligned() -> None:
    odd, large = np.ones(3, np.uint8), np.zeros(1000)
    buffers = CODEC.encode(1, MetricsRequest(), [odd, large])
    assert any(np.shares_memory(large, np.frombuffer(b, np.uint8)) for b in buffers)
    prefix = Prefix.parse(bytes(buffers[0][:PREFIX_BYTES]))
    header = CODEC.decode_header(prefix, buffers[0][PREFIX_BYTES:])
    assert [place.offset % ALIGNMENT for place in header.places] == [0, 0]
    body = np.empty(prefix.body, np.uint8)
    assert all(np.shares_memory(view, body) for view in views(header.places, body))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decoded(data)


@given(st.binary(max_size=200), st.integers(0, 100))
def test_a_random_header_is_a_frame_or_refused(header: bytes, body: int) -> None:
    prefix = Prefix.parse(with_header(header, body)[:PREFIX_BYTES])
    with contextlib.suppress(ProtocolError):
        CODEC.decode_header(prefix, header)


@given(some_arrays(), st.data())
def test_a_damaged_frame_is_a_frame_or_refused(arrays: list[Array], data: st.DataObject) -> None:
    whole = bytearray(encoded(PULL, arrays))
    prefix = Prefix.parse(bytes(whole[:PREFIX_BYTES]))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, PREFIX_BYTES + prefix.header - 1))
        whole[where] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        changed = Prefix.parse(bytes(whole[:PREFIX_BYTES]))
        split = PREFIX_BYTES + changed.header
        CODEC.decode_header(changed, bytes(whole[PREFIX_BYTES:split]))


@given(st.integers(0, PREFIX_BYTES + 40))
def test_a_frame_cut_short_is_refused(length: int) -> None:
    whole = encoded(MetricsRequest(), [])
    if length < len(whole):
        with pytest.raises(ProtocolError):
            decoded(whole[:length])


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", "TLS hello"),
        (b"\x15\x03\x03\x00\x02", "TLS alert"),
        (b"GET / HTTP/1.1\r\n", "HTTP request"),
        (b"HTTP/1.1 400", "HTTP answer"),
        (b"SSH-2.0-OpenSSH", "SSH hello"),
        (b"\x00\x01\x02", "bytes that start with b'\\\\x00"),
    ],
)
def test_other_protocols_are_recognised_by_their_first_bytes(start: bytes, name: str) -> None:
    with pytest.raises(ProtocolError, match=name):
        check_start(start)


def test_the_start_of_a_frame_is_accepted() -> None:
    whole = encoded(MetricsRequest(), [])
    for length in range(PREFIX_BYTES):
        check_start(whole[:length])


def test_an_unknown_version_is_named_with_the_own_one() -> None:
    data = bytearray(encoded(MetricsRequest(), []))
    data[len(MAGIC)] = 7
    with pytest.raises(ProtocolError, match=f"speaks version 7 .* this one speaks {VERSION}"):
        decoded(bytes(data))


def test_a_damaged_prefix_fails_its_checksum() -> None:
    data = bytearray(encoded(MetricsRequest(), []))
    data[10] ^= 1
    with pytest.raises(ProtocolError, match="checksum"):
        decoded(bytes(data))


def test_sizes_are_limited_before_memory_is_allocated() -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="body of 4398046511104 bytes; at most 1000"):
        Prefix.parse(Prefix(10, 1 << 42).pack(), body_limit=1000)
    with pytest.raises(ProtocolError, match="header of"):
        Prefix.parse(Prefix(HEADER_LIMIT + 1, 0).pack())
    for header in (
        b"\x93\x01\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ):
        with pytest.raises(ProtocolError):
            decoded(with_header(header))
    with pytest.raises(ProtocolError, match="at most 1000"):
        Prefix.parse(Prefix(10, 1001).pack(), body_limit=1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


ASK = {"type": "MetricsRequest"}


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (1, ASK),
        (-1, ASK, []),
        (1, {"type": "NoSuchMessage"}, []),
        (1, {"type": "Failure", "kind": 3, "text": ""}, []),
        (1, ASK, [("float32", [1 << 60])]),
        (1, ASK, [("float32", [1 << 40, 1 << 40, 0])]),
        (1, ASK, [("float32", [-1])]),
        (1, ASK, [("complex64", [0])]),
        (1, ASK, [("float32", [0] * 9)]),
        (1, ASK, [("float32", [0])] * (ARRAY_LIMIT + 1)),
        (1, ASK, [("float32", [2])]),
    ],
)
def test_a_malformed_header_is_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError):
        decoded(raw(*fields))


def test_the_body_length_must_match_its_arrays() -> None:
    header = msgspec.msgpack.encode((1, ASK, [("float64", [4])]))
    assert CODEC.decode_header(Prefix(len(header), 32), header).places[0].nbytes == 32
    with pytest.raises(ProtocolError, match="body of 31 bytes, but its arrays need 32"):
        CODEC.decode_header(Prefix(len(header), 31), header)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decoded(with_header(b"\x91" * 100_000))


def test_unsupported_arrays_are_refused_by_the_sender() -> None:
    with pytest.raises(PlanError, match="array 1 of a message is 1-dimensional complex64"):
        CODEC.encode(1, MetricsRequest(), [np.zeros(1), np.zeros(1, np.complex64)])
    with pytest.raises(PlanError, match="1-dimensional >f4"):
        CODEC.encode(1, MetricsRequest(), [np.zeros(1, ">f4")])
    small: MessageCodec[Message] = MessageCodec(Message, body_limit=100)
    with pytest.raises(PlanError, match="104 bytes of arrays, and at most 100"):
        small.encode(1, MetricsRequest(), [np.zeros(13)])
    with pytest.raises(PlanError, match="bytes of header"):
        CODEC.encode(1, Failure("PeerError", "x" * (HEADER_LIMIT + 1)))


def test_a_protocol_error_is_a_peer_error() -> None:
    assert issubclass(ProtocolError, PeerError)


def test_the_byte_layout_is_that_of_version_1() -> None:
    """Peers of this version must always understand it; a change needs a new version."""
    data = encoded(MetricsRequest(), [np.array([1], np.int64)], request=2)
    header = b"\x93\x02\x81\xa4type\xaeMetricsRequest\x91\x92\xa5int64\x91\x01"
    lengths = b"\xf1EET\x01\x00\x00\x00\x21\x00\x00\x00\x08" + bytes(7)
    assert data[: PREFIX_BYTES - 4] == lengths
    assert data[PREFIX_BYTES - 4 : PREFIX_BYTES] == zlib.crc32(lengths).to_bytes(4, "little")
    assert data[PREFIX_BYTES:] == header + b"\x01" + bytes(7)


@pytest.mark.parametrize("sent", range(8))
def test_unsent_returns_the_remaining_bytes(sent: int) -> None:
    buffers = [memoryview(b"ab"), memoryview(b""), memoryview(b"cdefg")]
    assert b"".join(unsent(buffers, sent)) == b"abcdefg"[sent:]


@pytest.mark.parametrize("merged", [-1, 0, 1 << 33])
def test_a_push_of_a_senseless_number_of_steps_is_refused(merged: int) -> None:
    """A reply has the sum of such numbers, and no frame has integers of more than 64 bits."""
    push = Push(1, 0, 0, 0, 0, [], [], False, merged=merged)
    with pytest.raises(ProtocolError, match="Expected `int`"):
        decoded(encoded(push, []))
