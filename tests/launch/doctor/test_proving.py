# SPDX-License-Identifier: Apache-2.0
"""Doctors with a token serve callers with that token and refuse all others."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.launch.doctor.doctors import HOSTS, exam_options, facts

from fleetlight.errors import MembershipError, PeerLostError, ProtocolError
from fleetlight.launch.doctor import probe
from fleetlight.launch.doctor.channel import DoctorChannel, dial
from fleetlight.launch.doctor.joint_examination import DoctorService, examine_together
from fleetlight.launch.doctor.messages import Acknowledged, Echo, Exam, Facts, GetFacts, Link
from fleetlight.roles.secret import Secret
from fleetlight.security.token import CLIENT, AuthRequest, Challenge, Proof, ProofTranscript, nonce

OPTIONS = exam_options(2)
TOKEN, OTHER = Secret("3f9ac27e51d0b846"), Secret("b846d0513f9ac27e")


def serving(token: Secret | None) -> DoctorService:
    listener = socket.create_server((HOSTS[1], OPTIONS.port))
    return DoctorService(listener, OPTIONS, 1, facts(OPTIONS), token)


@pytest.fixture
def service() -> Iterator[DoctorService]:
    doctor = serving(TOKEN)
    yield doctor
    doctor.close()


def wire() -> DoctorChannel:
    return dial(HOSTS[1], OPTIONS.port, HOSTS[0], 5.0)


@pytest.mark.usefixtures("service")
def test_caller_with_the_token_is_served() -> None:
    caller = wire()
    caller.introduce(TOKEN, HOSTS[0], HOSTS[1])
    assert caller.call(GetFacts(), Facts) == facts(OPTIONS)
    caller.close()
    link = Link(sender=0, receiver=1)
    measured = probe.measure(HOSTS[0], HOSTS[1], OPTIONS.port, link, (), 0.02, TOKEN)
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
def test_other_callers_are_refused(token: Secret | None, own: str, why: str) -> None:
    caller = wire()

    def speak() -> None:
        if token is None:
            caller.call(Echo(), Acknowledged)
        else:
            caller.introduce(token, own, HOSTS[1])

    with pytest.raises(ProtocolError, match=f"refused: {why}.* give all processes"):
        speak()
    caller.close()


def test_doctor_without_a_token_says_so() -> None:
    doctor, caller = serving(None), wire()
    with pytest.raises(ProtocolError, match="this doctor has no token; give all processes"):
        caller.introduce(TOKEN, HOSTS[0], HOSTS[1])
    caller.close()
    doctor.close()


def test_proof_cannot_be_replayed(service: DoctorService) -> None:
    caller, request = wire(), AuthRequest(nonce())
    challenge = caller.call(request, Challenge)
    transcript = ProofTranscript(
        request.nonce, challenge.nonce, f"doctor {HOSTS[0]} to {HOSTS[1]}".encode()
    )
    proof = Proof(transcript.proof(TOKEN, CLIENT))
    caller.call(proof, Proof)
    caller.close()
    again = wire()
    again.call(request, Challenge)
    with pytest.raises(ProtocolError, match="does not know the token"):
        again.call(proof, Proof)
    again.close()
    assert not service.was_called.is_set()


def test_unauthenticated_caller_is_limited_in_bytes() -> None:
    doctor, caller = serving(TOKEN), wire()
    caller._socket.sendall((1 << 20).to_bytes(4, "big") + bytes(1 << 12))
    with contextlib.suppress(PeerLostError):
        assert caller.receive_request() is None, "the doctor closes without waiting for the rest"
    caller.close()
    doctor.close()


def test_impostor_gets_no_request() -> None:
    with socket.create_server((HOSTS[1], 0)) as listener:
        caller = DoctorChannel(socket.create_connection(listener.getsockname()), "10.0.0.2", 5.0)
        impostor = DoctorChannel(listener.accept()[0], "10.0.0.1", 5.0)

    def impersonate() -> None:
        assert isinstance(impostor.receive_request(), AuthRequest)
        impostor.send(Challenge(nonce()))
        assert isinstance(impostor.receive_request(), Proof)
        impostor.send(Proof(bytes(32)))

    thread = threading.Thread(target=impersonate)
    thread.start()
    with pytest.raises(MembershipError, match=r"10\.0\.0\.2 does not know the token"):
        caller.introduce(TOKEN, "10.0.0.1", "10.0.0.2")
    thread.join(10)
    caller.close(), impostor.close()


@pytest.mark.slow
@pytest.mark.parametrize(("token", "succeeds"), [(TOKEN, True), (OTHER, False)])
def test_doctors_need_the_same_token(token: Secret, succeeds: bool) -> None:
    both, exams = exam_options(2), dict[int, Exam]()

    def examine(number: int, own_token: Secret) -> None:
        deadline_s = 60.0 if succeeds else 1.0
        exams[number] = examine_together(
            both, number, facts(both), deadline_s, lambda text: None, own_token
        )

    threads = [threading.Thread(target=examine, args=pair) for pair in enumerate((TOKEN, token))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (set(exams[0].facts) == {0, 1}) == succeeds
    if not succeeds:
        assert "does not know the token" in exams[0].absent[1]
