# SPDX-License-Identifier: Apache-2.0
"""Doctors that were given a token talk to no doctor that does not know it."""

from __future__ import annotations

from fleetlight.errors import MembershipError, ProtocolError
from fleetlight.launch.doctor.messages import Challenge, Knock, Proof, Refused, Request
from fleetlight.launch.doctor.wire import Wire
from fleetlight.roles.secret import Secret
from fleetlight.security import token as t

#: longer than what is said before a proof
_MOST_BYTES = 1 << 12


def introduce(wire: Wire, token: Secret, own: str, to: str) -> None:
    """Prove to the doctor at `to` that this one knows the token, and be shown the same."""
    knock = Knock(t.nonce())
    challenge = wire.ask(knock, Challenge)
    met = t.ProofTranscript(knock.nonce, challenge.nonce, _greeting(own, to))
    proof = wire.ask(Proof(met.proof(token, t.CLIENT)), Proof)
    if not met.verifies(token, t.SERVER, proof.mac):
        raise MembershipError(f"{wire.peer} {t.WRONG}")


def admit(wire: Wire, token: Secret | None, caller: str, own: str) -> Request | None:
    """The first request of a doctor that belongs here; None when it hangs up or is sent away."""
    first = wire.request(_MOST_BYTES)
    if token is None and not isinstance(first, Knock):
        return first
    if first is None:
        return None
    why = _why_not(wire, first, token, _greeting(caller, own))
    if why is not None:
        wire.say(Refused(why))
        return None
    return wire.request()


def _why_not(wire: Wire, knock: Request, token: Secret | None, greeting: bytes) -> str | None:
    """Why a caller is sent away; None once both sides have proved that they know the token."""
    if token is None:
        return f"this doctor {t.HAS_NONE_ITSELF}"
    if not isinstance(knock, Knock):
        return f"the caller {t.HAS_NONE}"
    met = t.ProofTranscript(knock.nonce, t.nonce(), greeting)
    wire.say(Challenge(met.server))
    proof = wire.request(_MOST_BYTES)
    if proof is None:
        raise ProtocolError(f"{wire.peer} hung up when it was asked for a proof")
    if not isinstance(proof, Proof) or not met.verifies(token, t.CLIENT, proof.mac):
        return f"the caller {t.WRONG}"
    wire.say(Proof(met.proof(token, t.SERVER)))
    return None


def _greeting(own: str, to: str) -> bytes:
    return f"doctor {own} to {to}".encode()
