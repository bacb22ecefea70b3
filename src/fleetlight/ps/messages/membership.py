# SPDX-License-Identifier: Apache-2.0
"""Barriers, heartbeats and goodbyes."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.ps.messages.base import MessageBase
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal


class Barrier(MessageBase, frozen=True):
    """Wait for all workers at server 0. Arrays: bytes of this worker. Reply: BarrierReply."""

    repeatable: ClassVar[bool] = True
    meeting: int
    operation: str
    deadline_s: float


class BarrierReply(MessageBase, frozen=True):
    """Arrays: the bytes of every worker, in worker order."""


class Leave(MessageBase, frozen=True):
    """Goodbye of a worker; `error` is set after a failure. Reply: Done."""

    repeatable: ClassVar[bool] = True
    error: str = ""
    #: True when the worker left because of a stop signal
    stopped: bool = False


class GoodbyeAck(MessageBase, frozen=True):
    """All servers confirmed the worker's goodbye; it sends no further request. Reply: Done."""


class Heartbeat(MessageBase, frozen=True):
    """A heartbeat, with the control signal of the worker. Reply: HeartbeatAck."""

    repeatable: ClassVar[bool] = True
    step: int
    call: ControlSignal = NO_SIGNAL
    #: the worker stops and reaches no further barrier
    stops: bool = False


class HeartbeatAck(MessageBase, frozen=True):
    """The merged control signals, and the number of workers that have not left."""

    call: ControlSignal = NO_SIGNAL
    here: int = 0
