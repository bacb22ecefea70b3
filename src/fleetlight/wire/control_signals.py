# SPDX-License-Identifier: Apache-2.0
"""Control signals: the requests to stop or to save that processes of a job send each other."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class ControlSignal(msgspec.Struct, frozen=True):
    """What all workers of a job are asked to do after a step. Signals merge and never expire."""

    #: stop the job
    stop: bool = False
    #: how many automatic saves have been requested so far
    saves: int = 0

    def __or__(self, other: ControlSignal) -> ControlSignal:
        return ControlSignal(self.stop or other.stop, max(self.saves, other.saves))


NO_SIGNAL = ControlSignal()


def combined(signals: Iterable[ControlSignal]) -> ControlSignal:
    """Merge signals of several workers."""
    total = NO_SIGNAL
    for signal in signals:
        total |= signal
    return total


class WorkerSignals:
    """The signals of one worker: what it requests, what it received, and how it stops."""

    def __init__(self) -> None:
        #: the request of this worker, which its heartbeats carry
        self.own = NO_SIGNAL
        #: received in replies to steps, which all workers of a step receive alike
        self.from_steps = NO_SIGNAL
        #: received in replies to heartbeats; other workers may not have them yet
        self.from_heartbeats = NO_SIGNAL
        #: True once this worker prepares to stop and reaches no further barrier
        self.stops = False
        #: True once this worker has stopped because of a signal
        self.stopped = False

    @property
    def received(self) -> ControlSignal:
        """All signals received by this worker."""
        return self.from_steps | self.from_heartbeats
