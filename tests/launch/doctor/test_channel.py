# SPDX-License-Identifier: Apache-2.0
"""Messages of doctors over a socket, and invalid bytes."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.errors import DeadlineError, FleetError, PeerLostError, ProtocolError
from fleetlight.launch.doctor.channel import MAX_BYTES, DoctorChannel
from fleetlight.launch.doctor.messages import (
    Acknowledged,
    Echo,
    Exam,
    ExamOptions,
    Facts,
    Finish,
    Refused,
    Time,
)


class Pair:
    """Both ends of a connection: a doctor's end, and a raw one that may send anything."""

    def __init__(self, limit_s: float = 5.0) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.other = socket.create_connection(listener.getsockname())
        self.wire = DoctorChannel(listener.accept()[0], "10.0.0.2", limit_s)
        listener.close()

    def close(self) -> None:
        self.wire.close()
        self.other.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_messages_round_trip(pair: Pair) -> None:
    other = DoctorChannel(pair.other, "10.0.0.1", 5.0)
    facts = Facts(asked=ExamOptions(hosts=("a", "b")), taken={5: "why"}, listening=(1, 2))
    exam = Exam(asked=facts.asked, facts={0: facts}, absent={1: "no"}, clocks={1: 0.5})
    pair.wire.send(Finish(exam))
    pair.wire.send(Echo())
    assert [other.receive_request(), other.receive_request()] == [Finish(exam), Echo()]
    other.send(facts)
    other.send(Acknowledged())
    assert [pair.wire.receive(Facts), pair.wire.receive(Acknowledged)] == [facts, Acknowledged()]
    pair.wire.close()
    assert other.receive_request() is None


@pytest.mark.parametrize(
    ("sent", "error", "complaint"),
    [
        pytest.param(b"GET ", ProtocolError, "does another program use this port", id="length"),
        pytest.param(b"\0\0\0\2no", ProtocolError, "another version of fleetlight", id="no json"),
        pytest.param(b"\0\0\0\2{}", ProtocolError, "another version", id="no type"),
        pytest.param(b"\0\0\0\0", ProtocolError, "another version", id="empty"),
        pytest.param(b"\0\0\0\x0f" + b"[" * 15, ProtocolError, "version", id="deep"),
        pytest.param(b"\0\0\0\5ab", PeerLostError, "in the middle of a frame", id="half"),
        pytest.param(b"\0\0", PeerLostError, "in the middle", id="half a length"),
        pytest.param(b"", ProtocolError, "replied with nothing", id="nothing"),
    ],
)
def test_invalid_message_is_an_error_that_names_the_peer(
    sent: bytes, error: type[FleetError], complaint: str, pair: Pair
) -> None:
    pair.other.sendall(sent)
    pair.other.shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=complaint) as caught:
        pair.wire.receive(Acknowledged)
    assert "10.0.0.2" in str(caught.value)


def test_reply_of_another_type_is_an_error(pair: Pair) -> None:
    other = DoctorChannel(pair.other, "10.0.0.1", 5.0)
    other.send(Time(3.0))
    with pytest.raises(ProtocolError, match="replied with Time, expected Acknowledged"):
        pair.wire.receive(Acknowledged)
    other.send(Refused("only 10.0.0.1 may"))
    with pytest.raises(ProtocolError, match="refused: only"):
        pair.wire.receive(Acknowledged)


def test_every_wait_ends() -> None:
    pair = Pair(limit_s=0.05)
    with pytest.raises(DeadlineError, match=r"10\.0\.0\.2 did not reply within 0\.05 s"):
        pair.wire.call(Echo(), Acknowledged)
    pair.wire.limit_s = 0.2
    # a peer that reads nothing, and a message larger than the buffers
    exam = Exam(asked=ExamOptions(names=("x" * MAX_BYTES,) * 4), facts={})
    with pytest.raises(DeadlineError, match="accepted no message"):
        pair.wire.send(Finish(exam))
    pair.close()


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=80))
def test_any_bytes_are_a_message_or_a_fleetlight_error(sent: bytes) -> None:
    pair = Pair()
    pair.other.sendall(sent)
    pair.other.close()
    try:
        while pair.wire.receive_request() is not None:
            pass
    except FleetError:
        pass
    finally:
        pair.close()
