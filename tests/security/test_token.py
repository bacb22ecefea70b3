# SPDX-License-Identifier: Apache-2.0
"""Proofs of a token: good for one side, one greeting and one connection."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import queue
import threading

import msgspec
import pytest

from fleetlight.errors import FleetError, MembershipError, ProtocolError
from fleetlight.roles.secret import Secret
from fleetlight.security.token import (
    CLIENT,
    NONCE_BYTES,
    SERVER,
    AuthRequest,
    Challenge,
    Proof,
    ProofExchange,
    ProofTranscript,
    nonce,
)

TOKEN, OTHER = Secret("a token of this job"), Secret("another job's token")
MET = ProofTranscript(b"c" * NONCE_BYTES, b"s" * NONCE_BYTES, b"worker 1 to server 0")


@pytest.mark.parametrize("side", [CLIENT, SERVER])
def test_a_proof_convinces_who_knows_the_token(side: bytes) -> None:
    assert MET.verifies(TOKEN, side, MET.proof(TOKEN, side))
    assert not MET.verifies(OTHER, side, MET.proof(TOKEN, side))
    assert not MET.verifies(TOKEN, side, MET.proof(OTHER, side))


@pytest.mark.parametrize("proof", [b"", b"x", bytes(32), bytes(64)])
def test_anything_else_convinces_nobody(proof: bytes) -> None:
    assert not MET.verifies(TOKEN, CLIENT, proof)


def test_a_proof_sent_back_is_none() -> None:
    assert not MET.verifies(TOKEN, CLIENT, MET.proof(TOKEN, SERVER))
    assert not MET.verifies(TOKEN, SERVER, MET.proof(TOKEN, CLIENT))


@pytest.mark.parametrize(
    "changes",
    [
        {"client": b"C" * NONCE_BYTES},
        {"server": b"S" * NONCE_BYTES},
        {"greeting": b"worker 2 to server 0"},
        {"client": MET.server, "server": MET.client},
    ],
)
def test_a_proof_of_another_meeting_is_none(changes: dict[str, bytes]) -> None:
    other = dataclasses.replace(MET, **changes)
    assert not MET.verifies(TOKEN, CLIENT, other.proof(TOKEN, CLIENT))


def test_bytes_cannot_be_moved_from_one_part_to_the_next() -> None:
    one = ProofTranscript(b"a" * NONCE_BYTES, b"b" * NONCE_BYTES, b"bc")
    other = ProofTranscript(b"a" * NONCE_BYTES, b"b" * (NONCE_BYTES + 1), b"c")
    assert one.proof(TOKEN, CLIENT) != other.proof(TOKEN, CLIENT)


def test_a_number_of_another_length_is_not_accepted() -> None:
    """Else a side could leave the choice of what is proved to the other."""
    short = ProofTranscript(b"", b"s" * NONCE_BYTES, b"")
    assert not short.verifies(TOKEN, CLIENT, short.proof(TOKEN, CLIENT))


def test_numbers_are_not_used_twice() -> None:
    assert len({nonce() for _ in range(100)}) == 100
    assert len(nonce()) == NONCE_BYTES


def test_the_layout_is_the_one_of_version_1() -> None:
    parts = [b"fleetlight job token 1", b"client", b"c" * 32, b"s" * 32, b"worker 1 to server 0"]
    said = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    expected = hmac.new(b"a token of this job", said, hashlib.sha256).digest()
    assert MET.proof(TOKEN, CLIENT) == expected


class Line:
    """Both ends of a connection in memory."""

    def __init__(self) -> None:
        there, back = queue.Queue[object](), queue.Queue[object]()
        self.client = ProofExchange("the server", there.put, lambda: back.get(timeout=10))
        self.server = ProofExchange("worker 1", back.put, lambda: there.get(timeout=10))

    def outcome(self, client: Secret | None, server: Secret | None, greeting: bytes) -> list[str]:
        """What the server says, then the client; the client of `greeting` calls server 0."""
        errors: list[str] = []

        def serve() -> None:
            try:
                self.server.admit(self.server.receive(), server, "this server", b"to server 0")
            except FleetError as error:
                errors.append(str(error))
                self.server.send(error)  # type: ignore[arg-type]

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            if client is None:
                self.client.send("a greeting")  # type: ignore[arg-type]
            else:
                self.client.prove(client, greeting, sent=b"")
        except MembershipError as error:
            errors.append(str(error))
        serving.join(10)
        return errors


@pytest.mark.parametrize(
    ("client", "server", "greeting", "complaints"),
    [
        (TOKEN, TOKEN, b"to server 0", []),
        (None, None, b"to server 0", []),
        (None, TOKEN, b"to server 0", ["worker 1 has no token"]),
        (OTHER, TOKEN, b"to server 0", ["worker 1 does not know", "the server does not know"]),
        (TOKEN, TOKEN, b"to server 1", ["worker 1 does not know", "the server does not know"]),
        (
            TOKEN,
            None,
            b"to server 0",
            ["this server has no token", "the server does not check the token"],
        ),
    ],
)
def test_both_sides_are_admitted_or_say_why_not(
    client: Secret | None, server: Secret | None, greeting: bytes, complaints: list[str]
) -> None:
    found = Line().outcome(client, server, greeting)
    assert len(found) == len(complaints)
    for said, complaint in zip(found, complaints, strict=True):
        assert complaint in said


def test_another_message_than_a_proof_is_named() -> None:
    line = Line()
    line.client.send(AuthRequest(nonce(), b"g"))
    line.client.send(Challenge(nonce()))
    with pytest.raises(ProtocolError, match="worker 1 sent Challenge, expected Proof"):
        line.server.admit(line.server.receive(), TOKEN, "this server")


def test_messages_are_those_of_version_1() -> None:
    """By their first names, in the messages of servers and of doctors."""
    packed = msgspec.msgpack.encode(AuthRequest(b"n", b"g"))
    assert msgspec.msgpack.decode(packed) == {"type": "Knock", "nonce": b"n", "greeting": b"g"}
    assert msgspec.json.encode(AuthRequest(b"n")) == b'{"type":"Knock","nonce":"bg=="}'
    assert msgspec.json.encode(Challenge(b"n")) == b'{"type":"Challenge","nonce":"bg=="}'
    assert msgspec.json.encode(Proof(b"n")) == b'{"type":"Proof","mac":"bg=="}'
