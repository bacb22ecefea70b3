# SPDX-License-Identifier: Apache-2.0
"""Agrees on shared memory over a connection: the client offers it, the server maps it.

The connection has authenticated both sides by then, and it carries the name and the ticket of the
offer. A server on another host, or without permission, refuses; bodies then stay on the wire.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from fleetlight.errors import DeadlineError, PeerError
from fleetlight.ps.messages import Failure, Message, ShareMemory
from fleetlight.ps.transport.frames import Frames
from fleetlight.ps.transport.memory.body_slots import BodySlots, file_bytes
from fleetlight.wire.shared_memory import (
    IS_AVAILABLE,
    MemoryOffer,
    map_shared_memory,
    new_shared_memory,
    take_descriptor,
)

OPERATION = "the offer of shared memory"
#: how long a server waits for a client, which is waiting for it
_TAKE_S = 5.0


def offer_memory(
    frames: Frames, number: int, slot_bytes: int, within_s: float, reply: Callable[[], Message]
) -> str:
    """Offer slots to the server; returns the reason if none are shared.

    `reply` receives the server's reply to request `number`.
    """
    if not IS_AVAILABLE:
        return "this system has no sealed memory"
    with contextlib.ExitStack() as stack:
        try:
            descriptor = new_shared_memory(file_bytes(slot_bytes))
            stack.callback(os.close, descriptor)
            memory = map_shared_memory(descriptor, file_bytes(slot_bytes))
            offer = stack.enter_context(contextlib.closing(MemoryOffer()))
        except OSError as error:
            return f"cannot allocate it: {error.strerror or error}"
        frames.send(number, ShareMemory(offer.name, offer.ticket, slot_bytes), (), OPERATION)
        try:
            offer.pass_to_peer(descriptor, frames.wire.fileno(), within_s)
        except TimeoutError as error:
            raise DeadlineError(f"{frames.wire.peer}: {error}") from None
        answer = reply()
    if isinstance(answer, Failure):
        return answer.text
    frames.slots = BodySlots(memory, slot_bytes, is_client=True)
    return ""


def accept_memory(frames: Frames, offer: ShareMemory) -> None:
    """Map the slots that a client offers; raise PeerError if that fails."""
    if not IS_AVAILABLE:
        raise PeerError("the server's system has no sealed memory")
    size = file_bytes(offer.slot_bytes)
    try:
        descriptor = take_descriptor(offer.name, offer.ticket, _TAKE_S)
        try:
            memory = map_shared_memory(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PeerError(f"the server cannot map it: {error.strerror or error}") from None
    frames.slots = BodySlots(memory, offer.slot_bytes, is_client=False)
