# SPDX-License-Identifier: Apache-2.0
"""Lets both ends of a connection prove that they know the job's token, before the greeting counts.

A side that has no token meets only others that have none: none of them goes on as if all were well.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetlight.errors import MembershipError, ProtocolError
from fleetlight.ps.messages import Challenge, Knock, Message, Proof
from fleetlight.ps.transport.frames import Frame, Frames
from fleetlight.roles.secret import Secret
from fleetlight.security import token as t

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def admit(
    frames: Frames, first: Frame, token: Secret | None, next_frame: Callable[[], Frame | None]
) -> Frame:
    """The greeting of a client that belongs to the job; an error for any other, to be told it.

    `first` is what it has said, and `next_frame` brings what it says next.
    """
    peer, knock = frames.wire.peer, first.message
    if not isinstance(knock, Knock):
        if token is not None:
            raise MembershipError(f"{peer} {t.HAS_NONE}")
        return first
    if token is None:
        raise MembershipError(f"{peer} asks for a proof, but this server {t.HAS_NONE_ITSELF}")
    met = t.ProofTranscript(knock.nonce, t.nonce(), knock.greeting)
    frames.send(first.request, Challenge(met.server), (), "a challenge")
    answer = next_frame()
    if answer is None:
        raise frames.wire.lost("a proof", "it hung up when it was asked for one")
    if not isinstance(answer.message, Proof):
        raise ProtocolError(f"{peer} sent {type(answer.message).__name__}, expected Proof")
    if not met.verifies(token, t.CLIENT, answer.message.mac):
        raise MembershipError(f"{peer} {t.WRONG}")
    frames.send(first.request, Proof(met.proof(token, t.SERVER)), (), "a proof")
    return Frame(first.request, _greeting_in(knock, peer), [])


def introduce(
    frames: Frames,
    number: int,
    greeting: Message,
    token: Secret,
    next_message: Callable[[], Message],
) -> None:
    """Send a greeting to a server; returns once each side has convinced the other.

    `next_message` brings the server's answers to request `number`.
    """
    peer = frames.wire.peer
    own, said = t.nonce(), _encoder.encode(greeting)
    frames.send(number, Knock(own, said), (), "a greeting")
    challenge = next_message()
    if not isinstance(challenge, Challenge):
        raise MembershipError(f"{peer} {t.NOT_ASKED}")
    met = t.ProofTranscript(own, challenge.nonce, said)
    frames.send(number, Proof(met.proof(token, t.CLIENT)), (), "a proof")
    proof = next_message()
    if not isinstance(proof, Proof) or not met.verifies(token, t.SERVER, proof.mac):
        raise MembershipError(f"{peer} {t.WRONG}")


def _greeting_in(knock: Knock, peer: str) -> Message:
    try:
        return _decoder.decode(knock.greeting)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError(f"{peer}: the greeting makes no sense: {error}") from None
