# SPDX-License-Identifier: Apache-2.0
"""How two processes show each other that they know the token of their job: servers, and doctors.

The token never travels. Each side brings a number that nobody has used before; a proof is an HMAC
over both numbers, the client's greeting and the side that gives it. So a proof is good for one
connection and one greeting, whoever has listened:

    client   AuthRequest   its number, and the greeting: who it is and whom it calls
    server   Challenge     its number
    client   Proof
    server   Proof, and only then the answer to the greeting

A side without a token meets only others without. A `ProofExchange` carries the messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import ClassVar

import msgspec

from fleetlight.errors import MembershipError, ProtocolError
from fleetlight.roles.secret import Secret

#: as many bytes as the digest has
NONCE_BYTES = 32
_DOMAIN = b"fleetlight job token 1"
CLIENT, SERVER = b"client", b"server"

GIVE_ALL = "give all processes of the job the same one (FLEET_TOKEN, or fleetrun --token_file)"
#: what is wrong with the other side, behind its name
HAS_NONE = f"comes without a token, and this side takes only who knows the job's; {GIVE_ALL}"
NOT_ASKED = f"does not ask for the token of the job, and may be a stranger; {GIVE_ALL}"
WRONG = f"does not know the token of this job; {GIVE_ALL}"
#: what is said of a server that nothing closes
OPEN = (
    "anyone who reaches {where} can read and change what this server keeps: give all processes of "
    "the job the same FLEET_TOKEN (openssl rand -hex 32), or strategy.ssl"
)
#: what is wrong with this side
HAS_NONE_ITSELF = f"has no token; {GIVE_ALL}"


def nonce() -> bytes:
    """A number that nobody has used before."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclasses.dataclass(frozen=True)
class ProofTranscript:
    """What two sides have said in the open."""

    client: bytes
    server: bytes
    #: who the client says it is, and whom it calls, as it was sent
    greeting: bytes

    def proof(self, token: Secret, side: bytes) -> bytes:
        """That `side` knows the token, on this connection and no other."""
        parts = (_DOMAIN, side, self.client, self.server, self.greeting)
        said = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(token.reveal().encode(), said, hashlib.sha256).digest()

    def verifies(self, token: Secret, side: bytes, proof: bytes) -> bool:
        """Whether a proof is that of `side`; takes as long for any wrong one."""
        fits = len(self.client) == len(self.server) == NONCE_BYTES
        return hmac.compare_digest(self.proof(token, side), proof) and fits


class _ProofStep(msgspec.Struct, frozen=True):
    """A message of the proof."""

    #: a proof holds for one connection: no step is sent again on another
    repeatable: ClassVar[bool] = False


# The tag is the name that the first version gave it.
class AuthRequest(_ProofStep, frozen=True, tag="Knock", omit_defaults=True):
    """The first words of a client that knows a token. Reply: Challenge."""

    #: a number that was never used before
    nonce: bytes
    #: empty where both sides know it
    greeting: bytes = b""


class Challenge(_ProofStep, frozen=True, tag=True):
    """The server's own number. Reply: Proof."""

    nonce: bytes


class Proof(_ProofStep, frozen=True, tag=True):
    """That this side knows the token. Reply: the server's Proof."""

    mac: bytes


@dataclasses.dataclass(frozen=True)
class ProofExchange:
    """How messages of the proof travel on one connection."""

    #: the other side, as errors name it
    peer: str
    send: Callable[[AuthRequest | Challenge | Proof], None]
    #: returns the next message, whatever it is; raises when the other side hangs up
    receive: Callable[[], object]

    def prove(self, token: Secret, greeting: bytes, sent: bytes) -> None:
        """The client's side: returns once each side has convinced the other.

        `sent` is what travels of the greeting: all of it, or nothing where the server knows it.
        """
        own = nonce()
        self.send(AuthRequest(own, sent))
        challenge = self.receive()
        if not isinstance(challenge, Challenge):
            raise MembershipError(f"{self.peer} {NOT_ASKED}")
        transcript = ProofTranscript(own, challenge.nonce, greeting)
        self.send(Proof(transcript.proof(token, CLIENT)))
        proof = self.receive()
        if not isinstance(proof, Proof) or not transcript.verifies(token, SERVER, proof.mac):
            raise MembershipError(f"{self.peer} {WRONG}")

    def admit(
        self, first: object, token: Secret | None, own: str, greeting: bytes | None = None
    ) -> None:
        """The server's side: returns for a client that belongs to the job, with the first message.

        `own` names this side; `greeting` is what the client proves, None: what it has sent.
        """
        if not isinstance(first, AuthRequest):
            if token is not None:
                raise MembershipError(f"{self.peer} {HAS_NONE}")
            return
        if token is None:
            raise MembershipError(f"{self.peer} asks for a proof, but {own} {HAS_NONE_ITSELF}")
        greeting = first.greeting if greeting is None else greeting
        transcript = ProofTranscript(first.nonce, nonce(), greeting)
        self.send(Challenge(transcript.server))
        proof = self.receive()
        if not isinstance(proof, Proof):
            raise ProtocolError(f"{self.peer} sent {type(proof).__name__}, expected Proof")
        if not transcript.verifies(token, CLIENT, proof.mac):
            raise MembershipError(f"{self.peer} {WRONG}")
        self.send(Proof(transcript.proof(token, SERVER)))
