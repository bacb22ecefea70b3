# SPDX-License-Identifier: Apache-2.0
"""Exchanges the proof of the job's token (`security/token.py`) in frames, before the greeting."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetlight.errors import ProtocolError
from fleetlight.ps.messages import Message
from fleetlight.ps.transport.frames import Frame, Frames
from fleetlight.roles.secret import Secret
from fleetlight.security.token import AuthRequest, Challenge, Proof, ProofExchange

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def admit(
    frames: Frames, first: Frame, token: Secret | None, next_frame: Callable[[], Frame | None]
) -> Frame:
    """Return the greeting of a client that proves the token; raise for any other client.

    `first` is its first frame; `next_frame` receives the next one.
    """

    def receive() -> Message:
        frame = next_frame()
        if frame is None:
            raise frames.wire.lost("a proof", "it closed the connection without proving the token")
        return frame.message

    _exchange(frames, first.request, receive).admit(first.message, token, "this server")
    if not isinstance(first.message, AuthRequest):
        return first
    return Frame(first.request, _greeting_in(first.message, frames.wire.peer), [])


def authenticate(
    frames: Frames,
    number: int,
    greeting: Message,
    token: Secret,
    next_message: Callable[[], Message],
) -> None:
    """Send a greeting to a server; return once both sides have proved the token.

    `next_message` receives the server's replies to request `number`.
    """
    said = _encoder.encode(greeting)
    _exchange(frames, number, next_message).prove(token, said, sent=said)


def _exchange(frames: Frames, number: int, receive: Callable[[], Message]) -> ProofExchange:
    def send(message: AuthRequest | Challenge | Proof) -> None:
        frames.send(number, message, (), "the proof of the token")

    return ProofExchange(frames.wire.peer, send, receive)


def _greeting_in(request: AuthRequest, peer: str) -> Message:
    try:
        return _decoder.decode(request.greeting)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError(f"{peer}: the greeting makes no sense: {error}") from None
