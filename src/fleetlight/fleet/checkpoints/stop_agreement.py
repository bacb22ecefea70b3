# SPDX-License-Identifier: Apache-2.0
"""`StopAgreement`, `PolledAgreement`: the workers of a job agree to save or stop at one place."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from fleetlight.errors import MembershipError
from fleetlight.fleet.protocols import Peers
from fleetlight.wire.control_signals import ControlSignal

#: the time between two polls, if the next steps take as long as the last ones
POLL_EVERY_S = 0.5
#: the most places between two polls: steps may become slower
MAX_PLACES = 100


class StopAgreement(Protocol):
    """Turns the requests of workers into what all of them do."""

    @property
    def in_lockstep(self) -> bool:
        """True where the workers make each step together."""

    def agree(self, request: ControlSignal) -> ControlSignal:
        """What all workers do at this place of the script, given this worker's request."""

    def stops_with_peers(self, error: MembershipError, *, was_asked: bool) -> bool:
        """True where this worker stops because the workers that it waits for have stopped."""

    def prepare_stop(self, grace_s: float) -> None:
        """Prepare for the last save of this worker."""

    def note_stopped(self) -> None:
        """Note that this worker has saved and stops."""


class PolledAgreement:
    """Workers that make each step together exchange their requests about twice a second."""

    in_lockstep = True

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._schedule = PollSchedule()
        self._polled_at = time.monotonic()

    def agree(self, request: ControlSignal) -> ControlSignal:
        if self._peers.alone:
            return request
        if not self._schedule.advance():
            return ControlSignal()
        now = time.monotonic()
        wishes = torch.tensor(
            [request.stop, request.saves, now - self._polled_at], dtype=torch.float64
        )
        stop, saves, seconds = self._peers.all_reduce(wishes, "max").tolist()
        self._schedule.record_poll(seconds)
        self._polled_at = time.monotonic()
        return ControlSignal(bool(stop), int(saves))

    def stops_with_peers(self, error: MembershipError, *, was_asked: bool) -> bool:
        """All workers stop at the same place."""
        return False

    def prepare_stop(self, grace_s: float) -> None:
        """The others stop at the same place."""

    def note_stopped(self) -> None:
        """No worker waits for this one."""


class PollSchedule:
    """The places of the script at which workers poll each other. Pure.

    All workers pass the same places in the same order, so they agree by counting. Between two polls
    nothing is sent. There are about two polls per second, at any speed of steps.
    """

    def __init__(self) -> None:
        self._place = 0
        self._last = 0
        self._next = 1

    def advance(self) -> bool:
        """Count the next place; returns True where all workers poll."""
        self._place += 1
        return self._place == self._next

    def record_poll(self, seconds: float) -> None:
        """Plan the next poll; `seconds` since the last one are equal on all workers."""
        passed = self._place - self._last
        fitting = passed * POLL_EVERY_S / max(seconds, 1e-9)
        self._last = self._place
        # at most twice as many places: single steps may be very slow or very fast
        self._next = self._place + max(1, int(min(fitting, 2 * passed, MAX_PLACES)))
