# SPDX-License-Identifier: Apache-2.0
"""What workers do together, and that they are there."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.ps.messages.base import NO_SIGNAL, ControlSignal, MessageBase


class Barrier(MessageBase, frozen=True, tag="Meet"):
    """Wait for all workers at server 0. Arrays: bytes of this worker. Answer: BarrierReply."""

    repeatable: ClassVar[bool] = True
    meeting: int
    operation: str
    deadline_s: float


class BarrierReply(MessageBase, frozen=True, tag="Met"):
    """Arrays: the bytes of every worker, in their order."""


class Leave(MessageBase, frozen=True):
    """Goodbye; `error` is set when it is a bad end. Answer: Done."""

    repeatable: ClassVar[bool] = True
    error: str = ""
    #: the worker has stopped because the job was asked to
    stopped: bool = False


class GoodbyeAck(MessageBase, frozen=True, tag="Heard"):
    """The worker knows that all servers have heard its goodbye, and calls no more. Answer: Done."""


class Heartbeat(MessageBase, frozen=True, tag="Beat"):
    """A sign of life, and what the worker calls for. Answer: HeartbeatAck."""

    repeatable: ClassVar[bool] = True
    step: int
    call: ControlSignal = NO_SIGNAL
    #: it stops, and comes to no meeting any more
    stops: bool = False


class HeartbeatAck(MessageBase, frozen=True, tag="Beaten"):
    """What has been called for, and how many workers have not left."""

    call: ControlSignal = NO_SIGNAL
    here: int = 0
