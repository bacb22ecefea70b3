# SPDX-License-Identifier: Apache-2.0
"""Mutual proof that two processes know the token of their job, for servers and doctors.

The token is never sent. Each side chooses a fresh nonce. A proof is an HMAC over both nonces, the
client's greeting and the side that proves. So a recorded proof is useless on another connection
or with another greeting:

    client   AuthRequest   its nonce, and the greeting: its name and the server it calls
    server   Challenge     its nonce
    client   Proof
    server   Proof, and only then the reply to the greeting

A process without a token accepts only others without one. A `ProofExchange` sends the messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import ClassVar

import msgspec

from fleetlight.errors import ProtocolError, TokenError
from fleetlight.roles.secret import Secret

#: the size of the digest
NONCE_BYTES = 32
_DOMAIN = b"fleetlight job token 1"
CLIENT, SERVER = b"client", b"server"

GIVE_ALL = "give all processes of the job the same one (FLEET_TOKEN, or fleetrun --token_file)"
#: errors about the other side, after its name
HAS_NONE = f"has no token, but this side requires that of the job; {GIVE_ALL}"
NOT_ASKED = f"does not check the token and may not belong to the job; {GIVE_ALL}"
WRONG = f"does not know the token of this job; {GIVE_ALL}"
#: the warning of a server that has neither token nor TLS
OPEN = (
    "anyone who reaches {where} can read and change the data of this server: give all processes of "
    "the job the same FLEET_TOKEN (openssl rand -hex 32), or strategy.ssl"
)
#: the error about this side
HAS_NONE_ITSELF = f"has no token; {GIVE_ALL}"


def nonce() -> bytes:
    """A fresh random number."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclasses.dataclass(frozen=True)
class ProofTranscript:
    """What two sides have exchanged in the clear."""

    client: bytes
    server: bytes
    #: the client's name and the server it calls, as sent
    greeting: bytes

    def proof(self, token: Secret, side: bytes) -> bytes:
        """The proof that `side` knows the token, for this connection only."""
        parts = (_DOMAIN, side, self.client, self.server, self.greeting)
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(token.reveal().encode(), message, hashlib.sha256).digest()

    def verifies(self, token: Secret, side: bytes, proof: bytes) -> bool:
        """True if `proof` is that of `side`; compares in constant time."""
        fits = len(self.client) == len(self.server) == NONCE_BYTES
        return hmac.compare_digest(self.proof(token, side), proof) and fits


class _ProofStep(msgspec.Struct, frozen=True, tag=True):
    """A message of the proof."""

    #: False, because a proof holds for one connection
    repeatable: ClassVar[bool] = False


class AuthRequest(_ProofStep, frozen=True, omit_defaults=True):
    """The first message of a client that knows a token. Reply: Challenge."""

    nonce: bytes
    #: empty if both sides know it
    greeting: bytes = b""


class Challenge(_ProofStep, frozen=True):
    """The server's nonce. Reply: Proof."""

    nonce: bytes


class Proof(_ProofStep, frozen=True):
    """The proof that this side knows the token. Reply: the server's Proof."""

    mac: bytes


@dataclasses.dataclass(frozen=True)
class ProofExchange:
    """The exchange of proofs on one connection."""

    #: the name of the other side in errors
    peer: str
    send: Callable[[AuthRequest | Challenge | Proof], None]
    #: returns the next message of any kind; raises when the connection ends
    receive: Callable[[], object]

    def prove(self, token: Secret, greeting: bytes, sent: bytes) -> None:
        """Run the client's side; return once both proofs are verified.

        `sent` is the greeting in the message, empty if the server knows it.
        """
        own = nonce()
        self.send(AuthRequest(own, sent))
        challenge = self.receive()
        if not isinstance(challenge, Challenge):
            raise TokenError(f"{self.peer} {NOT_ASKED}")
        transcript = ProofTranscript(own, challenge.nonce, greeting)
        self.send(Proof(transcript.proof(token, CLIENT)))
        proof = self.receive()
        if not isinstance(proof, Proof) or not transcript.verifies(token, SERVER, proof.mac):
            raise TokenError(f"{self.peer} {WRONG}")

    def admit(
        self, first: object, token: Secret | None, own: str, greeting: bytes | None = None
    ) -> None:
        """Run the server's side from the message `first`; return if the client is admitted.

        `own` names this side. `greeting` is what the client proves; None: what it has sent.
        """
        if not isinstance(first, AuthRequest):
            if token is not None:
                raise TokenError(f"{self.peer} {HAS_NONE}")
            return
        if token is None:
            raise TokenError(f"{self.peer} asks for a proof, but {own} {HAS_NONE_ITSELF}")
        greeting = first.greeting if greeting is None else greeting
        transcript = ProofTranscript(first.nonce, nonce(), greeting)
        self.send(Challenge(transcript.server))
        proof = self.receive()
        if not isinstance(proof, Proof):
            raise ProtocolError(f"{self.peer} sent {type(proof).__name__}, expected Proof")
        if not transcript.verifies(token, CLIENT, proof.mac):
            raise TokenError(f"{self.peer} {WRONG}")
        self.send(Proof(transcript.proof(token, SERVER)))
