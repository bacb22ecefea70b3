# SPDX-License-Identifier: Apache-2.0
"""Proofs of a token are valid for one side, one greeting and one connection."""

import dataclasses
import hashlib
import hmac
import queue
import threading

import msgspec
import pytest

from fleetlight.errors import FleetError, MembershipError, ProtocolError
from fleetlight.roles.secret import Secret
from fleetlight.security import token

TOKEN, OTHER = Secret("a token of this job"), Secret("another job's token")
TRANSCRIPT = token.ProofTranscript(
    b"c" * token.NONCE_BYTES, b"s" * token.NONCE_BYTES, b"worker 1 to server 0"
)


@pytest.mark.parametrize("side", [token.CLIENT, token.SERVER])
def test_a_proof_is_verified_with_the_same_token_only(side: bytes) -> None:
    assert TRANSCRIPT.verifies(TOKEN, side, TRANSCRIPT.proof(TOKEN, side))
    assert not TRANSCRIPT.verifies(OTHER, side, TRANSCRIPT.proof(TOKEN, side))
    assert not TRANSCRIPT.verifies(TOKEN, side, TRANSCRIPT.proof(OTHER, side))


@pytest.mark.parametrize("proof", [b"", b"x", bytes(32), bytes(64)])
def test_other_bytes_are_no_proof(proof: bytes) -> None:
    assert not TRANSCRIPT.verifies(TOKEN, token.CLIENT, proof)


def test_a_reflected_proof_is_refused() -> None:
    assert not TRANSCRIPT.verifies(TOKEN, token.CLIENT, TRANSCRIPT.proof(TOKEN, token.SERVER))
    assert not TRANSCRIPT.verifies(TOKEN, token.SERVER, TRANSCRIPT.proof(TOKEN, token.CLIENT))


@pytest.mark.parametrize(
    "changes",
    [
        {"client": b"C" * token.NONCE_BYTES},
        {"server": b"S" * token.NONCE_BYTES},
        {"greeting": b"worker 2 to server 0"},
        {"client": TRANSCRIPT.server, "server": TRANSCRIPT.client},
    ],
)
def test_a_proof_of_another_connection_is_refused(changes: dict[str, bytes]) -> None:
    other = dataclasses.replace(TRANSCRIPT, **changes)
    assert not TRANSCRIPT.verifies(TOKEN, token.CLIENT, other.proof(TOKEN, token.CLIENT))


def test_bytes_cannot_move_between_parts_of_the_transcript() -> None:
    one = token.ProofTranscript(b"a" * token.NONCE_BYTES, b"b" * token.NONCE_BYTES, b"bc")
    other = token.ProofTranscript(b"a" * token.NONCE_BYTES, b"b" * (token.NONCE_BYTES + 1), b"c")
    assert one.proof(TOKEN, token.CLIENT) != other.proof(TOKEN, token.CLIENT)


def test_a_nonce_of_another_length_is_refused() -> None:
    """Otherwise one side could let the other choose what is proved."""
    short = token.ProofTranscript(b"", b"s" * token.NONCE_BYTES, b"")
    assert not short.verifies(TOKEN, token.CLIENT, short.proof(TOKEN, token.CLIENT))


def test_nonces_are_unique() -> None:
    assert len({token.nonce() for _ in range(100)}) == 100
    assert len(token.nonce()) == token.NONCE_BYTES


def test_the_proof_has_the_layout_of_version_1() -> None:
    parts = [b"fleetlight job token 1", b"client", b"c" * 32, b"s" * 32, b"worker 1 to server 0"]
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    expected = hmac.new(b"a token of this job", message, hashlib.sha256).digest()
    assert TRANSCRIPT.proof(TOKEN, token.CLIENT) == expected


class ConnectionInMemory:
    """Both ends of a connection in memory."""

    def __init__(self) -> None:
        there, back = queue.Queue[object](), queue.Queue[object]()
        self.client = token.ProofExchange("the server", there.put, lambda: back.get(timeout=10))
        self.server = token.ProofExchange("worker 1", back.put, lambda: there.get(timeout=10))

    def outcome(self, client: Secret | None, server: Secret | None, greeting: bytes) -> list[str]:
        """The error of the server, then of the client; the client sends `greeting` for server 0."""
        errors: list[str] = []

        def serve() -> None:
            try:
                self.server.admit(self.server.receive(), server, "this server", b"to server 0")
            except FleetError as error:
                errors.append(str(error))
                self.server.send(error)  # type: ignore[arg-type]

        server_thread = threading.Thread(target=serve)
        server_thread.start()
        try:
            if client is None:
                self.client.send("a greeting")  # type: ignore[arg-type]
            else:
                self.client.prove(client, greeting, sent=b"")
        except MembershipError as error:
            errors.append(str(error))
        server_thread.join(10)
        return errors


@pytest.mark.parametrize(
    ("client", "server", "greeting", "expected_errors"),
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
def test_both_sides_are_admitted_or_get_an_error(
    client: Secret | None, server: Secret | None, greeting: bytes, expected_errors: list[str]
) -> None:
    found = ConnectionInMemory().outcome(client, server, greeting)
    assert len(found) == len(expected_errors)
    for message, expected in zip(found, expected_errors, strict=True):
        assert expected in message


def test_a_message_in_place_of_a_proof_is_named() -> None:
    connection = ConnectionInMemory()
    connection.client.send(token.AuthRequest(token.nonce(), b"g"))
    connection.client.send(token.Challenge(token.nonce()))
    with pytest.raises(ProtocolError, match="worker 1 sent Challenge, expected Proof"):
        connection.server.admit(connection.server.receive(), TOKEN, "this server")


def test_messages_have_the_form_of_version_1() -> None:
    """With the type names of version 1, in the messages of servers and of doctors."""
    packed = msgspec.msgpack.encode(token.AuthRequest(b"n", b"g"))
    assert msgspec.msgpack.decode(packed) == {
        "type": "AuthRequest",
        "nonce": b"n",
        "greeting": b"g",
    }
    assert msgspec.json.encode(token.AuthRequest(b"n")) == b'{"type":"AuthRequest","nonce":"bg=="}'
    assert msgspec.json.encode(token.Challenge(b"n")) == b'{"type":"Challenge","nonce":"bg=="}'
    assert msgspec.json.encode(token.Proof(b"n")) == b'{"type":"Proof","mac":"bg=="}'
