# SPDX-License-Identifier: Apache-2.0
"""`Watch`: from what was seen, what to do next. No processes, no clock, no sockets.

RUNNING -> SETTLING   somebody failed: who else does, before anything is touched?
        -> LEAVING    all workers are done: servers may end by themselves
        -> ENDING     a signal was sent, SIGKILL follows after the grace period
        -> OVER
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Sequence

from fleetlight.launch.job.layout import Member
from fleetlight.launch.processes.reason import Exit, first_failure
from fleetlight.roles.role import Kind

#: how long others may take to fail too, before the first failure is chosen
SETTLE_S = 1.8
#: as long as one is about to exit, perhaps with the code that is the reason
EXIT_S = 4.0
#: how long servers may take to end by themselves when all workers have
LEAVE_S = 5.0
#: how long the system may take to end a killed process; beyond that it is left to it
UNKILLABLE_S = 5.0


class Phase(enum.Enum):
    """Where a gang is in its life."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()
    LEAVING = enum.auto()
    ENDING = enum.auto()
    OVER = enum.auto()


class Elsewhere(enum.Enum):
    """What the launchers of the other machines say."""

    RUNNING = enum.auto()
    DONE = enum.auto()
    #: something happened that ends this start of the job here too
    STOP = enum.auto()


class Verdict(enum.Enum):
    """How a gang ended."""

    SUCCESS = enum.auto()
    FAILED = enum.auto()
    INTERRUPTED = enum.auto()
    #: ended because of another machine
    STOPPED = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything `Watch` may base a decision on."""

    now: float
    exits: Sequence[Exit] = ()
    #: True while a process that runs has said that it is about to exit
    leaving: bool = False
    interrupts: Sequence[int] = ()
    elsewhere: Elsewhere = Elsewhere.DONE


class Watch:
    """Decides over one gang, from its start to its end."""

    def __init__(self, members: Sequence[Member], grace_s: float, revivals: int = 0) -> None:
        """`revivals` is how many processes may be started again alone."""
        self._members = members
        self._revivals = revivals
        self._workers = sum(1 for member in members if member.kind is Kind.WORKER)
        self._grace_s = grace_s
        self._since = 0.0
        self._interrupts_taken = 0
        self._killed = False
        self.phase = Phase.RUNNING
        self.verdict = Verdict.SUCCESS
        #: the local failure that the others follow from
        self.failure: Exit | None = None
        #: the interrupt that ended the job
        self.signal = 0
        #: True when servers had to be ended after the workers were done
        self.ended_servers = False
        #: how many processes were started again alone
        self.revived = 0

    @property
    def revivals_left(self) -> int:
        """How many more may be."""
        return self._revivals - self.revived

    def to_revive(self, seen: Seen) -> Exit | None:
        """A process that is to be started again, while the others go on."""
        if self.phase is not Phase.RUNNING or seen.interrupts or not self.revivals_left:
            return None
        lost = next((one for one in seen.exits if one.returns), None)
        self.revived += lost is not None
        return lost

    @property
    def is_over(self) -> bool:
        """True when nothing of the gang runs any more."""
        return self.phase is Phase.OVER

    def step(self, seen: Seen) -> int | None:
        """The signal to send to all processes now, if any."""
        if seen.interrupts and self.phase in (Phase.RUNNING, Phase.SETTLING, Phase.LEAVING):
            return self._interrupt(seen)
        decide = {
            Phase.RUNNING: self._run,
            Phase.SETTLING: self._settle,
            Phase.LEAVING: self._leave,
            Phase.ENDING: self._end,
        }
        return decide[self.phase](seen) if self.phase in decide else None

    def _run(self, seen: Seen) -> int | None:
        if any(one.status for one in seen.exits):
            self._enter(Phase.SETTLING, seen)
            return self._settle(seen)
        if seen.elsewhere is Elsewhere.STOP:
            return self._begin_end(Verdict.STOPPED, seen)
        if self._workers_done(seen) and seen.elsewhere is Elsewhere.DONE:
            self._enter(Phase.LEAVING, seen)
            return self._leave(seen)
        return None

    def _settle(self, seen: Seen) -> int | None:
        first = first_failure(seen.exits)
        assert first is not None
        patience_s = EXIT_S if seen.leaving else SETTLE_S
        if first.is_certain or self._all_exited(seen) or seen.now - self._since >= patience_s:
            self.failure = first
            return self._begin_end(Verdict.FAILED, seen)
        return None

    def _leave(self, seen: Seen) -> int | None:
        if any(one.status for one in seen.exits):
            self._enter(Phase.SETTLING, seen)
            return self._settle(seen)
        if self._all_exited(seen):
            self._enter(Phase.OVER, seen)
        elif seen.now - self._since >= LEAVE_S:
            self.ended_servers = True
            return self._begin_end(Verdict.SUCCESS, seen)
        return None

    def _end(self, seen: Seen) -> int | None:
        waited = seen.now - self._since
        again = len(seen.interrupts) > self._interrupts_taken
        if self._all_exited(seen) or waited >= self._grace_s + UNKILLABLE_S:
            self._enter(Phase.OVER, seen)
        elif not self._killed and (again or waited >= self._grace_s):
            self._killed = True
            return signal.SIGKILL
        return None

    def _interrupt(self, seen: Seen) -> int | None:
        self.signal = seen.interrupts[0]
        return self._begin_end(Verdict.INTERRUPTED, seen, self.signal)

    def _begin_end(self, verdict: Verdict, seen: Seen, number: int = signal.SIGTERM) -> int | None:
        self.verdict = verdict
        self._interrupts_taken = len(seen.interrupts)
        if self._all_exited(seen):
            self._enter(Phase.OVER, seen)
            return None
        self._enter(Phase.ENDING, seen)
        return number

    def _enter(self, phase: Phase, seen: Seen) -> None:
        self.phase = phase
        self._since = seen.now

    def _workers_done(self, seen: Seen) -> bool:
        ended = sum(1 for one in seen.exits if one.member.kind is Kind.WORKER)
        return ended == self._workers

    def _all_exited(self, seen: Seen) -> bool:
        return len(seen.exits) == len(self._members)
