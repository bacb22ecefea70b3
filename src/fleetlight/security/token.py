# SPDX-License-Identifier: Apache-2.0
"""How two processes show each other that they know the token of their job. Pure.

The token never travels. Each side brings a number that nobody has used before; a proof is an HMAC
over both numbers, the client's greeting and the side that gives it. So a proof is good for one
connection and one greeting, whoever has listened:

    client   Knock       its number, and the greeting: who it is and whom it calls
    server   Challenge   its number
    client   Proof
    server   Proof, and only then the answer to the greeting
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets

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
