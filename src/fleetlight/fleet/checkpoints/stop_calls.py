# SPDX-License-Identifier: Apache-2.0
"""How the workers of a job agree that they save or stop now: `StopCalls`, `MeetingCalls`."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from fleetlight.errors import MembershipError
from fleetlight.fleet.protocols import Peers
from fleetlight.ps.messages.base import ControlSignal

#: how long a call may wait for the next meeting, as far as steps take as long as they took
EVERY_S = 0.5
#: more places than these never lie between two meetings: steps may become slower
MOST = 100


class StopCalls(Protocol):
    """What a worker calls for, and what all of them are to do."""

    @property
    def in_lockstep(self) -> bool:
        """True where the workers make their steps together."""

    def called(self, wish: ControlSignal) -> ControlSignal:
        """What all are to do at this place of the script; the same on all of them."""

    def is_left_alone(self, error: MembershipError, *, was_asked: bool) -> bool:
        """True where the others stop whom this worker waits for, so that it stops as well."""

    def stopping(self, grace_s: float) -> None:
        """This worker is about to save and stop."""

    def stopped(self) -> None:
        """This worker has saved and stops."""


class MeetingCalls:
    """Workers that make their steps together meet now and then, and ask each other."""

    in_lockstep = True

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._rhythm = PollSchedule()
        self._met_at = time.monotonic()

    def called(self, wish: ControlSignal) -> ControlSignal:
        """As in `StopCalls`."""
        if self._peers.alone:
            return wish
        if not self._rhythm.arrives():
            return ControlSignal()
        now = time.monotonic()
        told = torch.tensor([wish.stop, wish.saves, now - self._met_at], dtype=torch.float64)
        stop, saves, seconds = self._peers.all_reduce(told, "max").tolist()
        self._rhythm.met(seconds)
        self._met_at = time.monotonic()
        return ControlSignal(bool(stop), int(saves))

    def is_left_alone(self, error: MembershipError, *, was_asked: bool) -> bool:
        """All stop at the same place."""
        return False

    def stopping(self, grace_s: float) -> None:
        """The others know it."""

    def stopped(self) -> None:
        """Nobody waits for this worker."""


class PollSchedule:
    """At which of their common places workers ask each other what is called for. Pure.

    All workers pass the same places in the same order, so to count them is to agree on them.
    Nothing is sent between two meetings. There are about two in a second, at any speed of steps.
    """

    def __init__(self) -> None:
        self._place = 0
        self._last = 0
        self._next = 1

    def arrives(self) -> bool:
        """The worker has come to the next place; answers whether all meet there."""
        self._place += 1
        return self._place == self._next

    def met(self, seconds: float) -> None:
        """They have met; `seconds` have passed since the last time, the same on all of them."""
        passed = self._place - self._last
        fitting = passed * EVERY_S / max(seconds, 1e-9)
        self._last = self._place
        # a first step is slow, a lucky one fast: to trust either would be to jump
        self._next = self._place + max(1, int(min(fitting, 2 * passed, MOST)))
