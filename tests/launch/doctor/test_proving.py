# SPDX-License-Identifier: Apache-2.0
"""Doctors with a token: they answer their own, and refuse all others by name."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.launch.doctor.doctors import HOSTS, asked, facts

from fleetlight.errors import MembershipError, PeerLostError, ProtocolError
from fleetlight.launch.doctor import probe
from fleetlight.launch.doctor.channel import DoctorChannel, dial
from fleetlight.launch.doctor.meeting import meet
from fleetlight.launch.doctor.messages import Acknowledged, Echo, Exam, Facts, Link, TellFacts
from fleetlight.launch.doctor.service import DoctorService
from fleetlight.roles.secret import Secret
from fleetlight.security.token import CLIENT, AuthRequest, Challenge, Proof, ProofTranscript, nonce

ASKED = asked(2)
TOKEN, OTHER = Secret("3f9ac27e51d0b846"), Secret("b846d0513f9ac27e")


def serving(token: Secret | None) -> DoctorService:
    listener = socket.create_server((HOSTS[1], ASKED.port))
    return DoctorService(listener, ASKED, 1, facts(ASKED), token)


@pytest.fixture
def service() -> Iterator[DoctorService]:
    made = serving(TOKEN)
    yield made
    made.close()


def wire() -> DoctorChannel:
    return dial(HOSTS[1], ASKED.port, HOSTS[0], 5.0)


@pytest.mark.usefixtures("service")
def test_who_knows_the_token_is_answered() -> None:
    asking = wire()
    asking.introduce(TOKEN, HOSTS[0], HOSTS[1])
    assert asking.call(TellFacts(), Facts) == facts(ASKED)
    asking.close()
    link = Link(sender=0, receiver=1)
    measured = probe.measure(HOSTS[0], HOSTS[1], ASKED.port, link, (), 0.02, TOKEN)
    assert measured.error == ""
    assert (measured.bytes_per_s or 0) > 0


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(
    ("token", "own", "why"),
    [
        (OTHER, HOSTS[0], "the caller does not know the token"),
        (TOKEN, HOSTS[2], "the caller does not know the token"),
        (None, HOSTS[0], "the caller has no token"),
    ],
    ids=["wrong", "of another machine", "none"],
)
def test_anybody_else_is_refused(token: Secret | None, own: str, why: str) -> None:
    asking = wire()

    def speak() -> None:
        if token is None:
            asking.call(Echo(), Acknowledged)
        else:
            asking.introduce(token, own, HOSTS[1])

    with pytest.raises(ProtocolError, match=f"refused: {why}.* give all processes"):
        speak()
    asking.close()


def test_a_doctor_without_a_token_says_so() -> None:
    made, asking = serving(None), wire()
    with pytest.raises(ProtocolError, match="this doctor has no token; give all processes"):
        asking.introduce(TOKEN, HOSTS[0], HOSTS[1])
    asking.close()
    made.close()


def test_a_proof_cannot_be_used_again(service: DoctorService) -> None:
    asking, knock = wire(), AuthRequest(nonce())
    challenge = asking.call(knock, Challenge)
    met = ProofTranscript(knock.nonce, challenge.nonce, f"doctor {HOSTS[0]} to {HOSTS[1]}".encode())
    proof = Proof(met.proof(TOKEN, CLIENT))
    asking.call(proof, Proof)
    asking.close()
    again = wire()
    again.call(knock, Challenge)
    with pytest.raises(ProtocolError, match="does not know the token"):
        again.call(proof, Proof)
    again.close()
    assert not service.was_called.is_set()


def test_a_stranger_may_not_say_much() -> None:
    made, asking = serving(TOKEN), wire()
    asking._socket.sendall((1 << 20).to_bytes(4, "big") + bytes(1 << 12))
    with contextlib.suppress(PeerLostError):
        assert asking.receive_request() is None, "it hangs up, and does not wait for the rest"
    asking.close()
    made.close()


def test_a_doctor_that_poses_as_another_is_told_nothing() -> None:
    with socket.create_server((HOSTS[1], 0)) as door:
        caller = DoctorChannel(socket.create_connection(door.getsockname()), "10.0.0.2", 5.0)
        poser = DoctorChannel(door.accept()[0], "10.0.0.1", 5.0)

    def pose() -> None:
        assert isinstance(poser.receive_request(), AuthRequest)
        poser.send(Challenge(nonce()))
        assert isinstance(poser.receive_request(), Proof)
        poser.send(Proof(bytes(32)))

    thread = threading.Thread(target=pose)
    thread.start()
    with pytest.raises(MembershipError, match=r"10\.0\.0\.2 does not know the token"):
        caller.introduce(TOKEN, "10.0.0.1", "10.0.0.2")
    thread.join(10)
    caller.close(), poser.close()


@pytest.mark.parametrize(("token", "came"), [(TOKEN, True), (OTHER, False)])
def test_two_doctors_meet_if_they_know_the_same_token(token: Secret, came: bool) -> None:
    both, exams = asked(2), dict[int, Exam]()

    def examine(number: int, its: Secret) -> None:
        deadline_s = 60.0 if came else 1.0
        exams[number] = meet(both, number, facts(both), deadline_s, lambda text: None, its)

    threads = [threading.Thread(target=examine, args=pair) for pair in enumerate((TOKEN, token))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (set(exams[0].facts) == {0, 1}) == came
    if not came:
        assert "does not know the token" in exams[0].absent[1]
