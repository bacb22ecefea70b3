# SPDX-License-Identifier: Apache-2.0
"""`Watch`: from what was seen, what to do next. No processes, no clock, no sockets.

RUNNING -> SETTLING   somebody failed: who else does, before anything is touched?
        -> LEAVING    all workers are done: servers may end by themselves
        -> STOPPING   workers were asked to save and end, and servers end when they have
        -> ENDING     a signal was sent, SIGKILL follows after the grace period
        -> OVER
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Sequence

import msgspec

from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.failure import ProcessExit, first_failure, is_killed
from fleetlight.launch.status import Stop
from fleetlight.roles.role import Kind

#: how long others may take to fail too, before the first failure is chosen
SETTLE_S = 1.8
#: as long as one is about to exit, perhaps with the code that is the reason
EXIT_S = 4.0
#: how long servers may take to end by themselves when all workers have
LEAVE_S = 5.0
#: how long the ends of the servers may tell whether a worker was heard that was killed amid its
#: goodbye; then it is started again
GOODBYE_S = 5.0
#: how long a process that only notes the first SIGTERM may take to do so; the second one ends it
FIRST_SIGTERM_S = 0.3
#: how long the system may take to end a killed process; beyond that it is left to it
UNKILLABLE_S = 5.0


class Phase(enum.Enum):
    """Where a gang is in its life."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()
    LEAVING = enum.auto()
    STOPPING = enum.auto()
    ENDING = enum.auto()
    OVER = enum.auto()


class RemoteState(enum.Enum):
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
    #: asked to stop, and saved before that
    SAVED = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything `Watch` may base a decision on."""

    now: float
    exits: Sequence[ProcessExit] = ()
    #: True while a process that runs has said that it is about to exit
    leaving: bool = False
    interrupts: Sequence[int] = ()
    #: True when all processes that run save before they end
    can_stop: bool = False
    elsewhere: RemoteState = RemoteState.DONE


class Watch:
    """Decides over one gang, from its start to its end."""

    def __init__(
        self,
        members: Sequence[JobProcess],
        grace_s: float,
        max_restarts: int = 0,
        stop_s: float = 30.0,
    ) -> None:
        """`max_restarts` is how many processes may be started again alone.

        `stop_s` is how long a stop may take for which the job is saved.
        """
        self._members = members
        self._max_restarts = max_restarts
        self._workers = sum(1 for member in members if member.kind is Kind.WORKER)
        self._grace_s, self._stop_s = grace_s, stop_s
        self._since = 0.0
        self._interrupts_taken = 0
        self._killed = False
        #: True while nobody may have taken SIGTERM for more than the wish for a stop
        self._may_be_noted = False
        self.phase = Phase.RUNNING
        self.verdict = Verdict.SUCCESS
        #: the local failure that the others follow from, or that kept a stop from being one
        self.failure: ProcessExit | None = None
        #: the interrupt that ended the job
        self.signal = 0
        #: whom the signal that was answered last asks to stop; empty: it is to end all
        self.asked: tuple[Kind, ...] = ()
        #: where the job can go on, once it has stopped
        self.stop: Stop | None = None
        #: True when it was to stop, and there was no time
        self.stop_failed = False
        #: True when servers had to be ended after the workers were done
        self.ended_servers = False
        #: when those were seen that were killed amid their goodbye
        self._goodbye_seen_at: dict[JobProcess, float] = {}
        #: how many processes were started again alone
        self.restarted = 0
        #: those without which the others go on
        self.continued_without: list[ProcessExit] = []

    @property
    def restarts_left(self) -> int:
        """How many more may be."""
        return self._max_restarts - self.restarted

    def confirmed_exits(self, exits: Sequence[ProcessExit], now: float) -> list[ProcessExit]:
        """What counts of the ends that were seen.

        Servers end well when they have heard the goodbyes of all workers. So the end of one that
        was killed amid its own is reported once theirs are, or have not come for a while.
        """
        exits = _with_saved_stop(exits)
        servers = sum(1 for member in self._members if member.kind is Kind.SERVER)
        ended = sum(1 for one in exits if one.member.kind is Kind.SERVER)
        fails = any(one.has_failed and not one.killed_while_leaving for one in exits)
        goes_on = self.phase in (Phase.RUNNING, Phase.STOPPING)
        if not servers or fails or not goes_on:
            return list(exits)
        if ended == servers:
            return [_as_departed(one) if one.killed_while_leaving else one for one in exits]
        return [one for one in exits if not one.killed_while_leaving or self._is_overdue(one, now)]

    def _is_overdue(self, one: ProcessExit, now: float) -> bool:
        return now - self._goodbye_seen_at.setdefault(one.member, now) >= GOODBYE_S

    def to_restart(self, seen: Observation) -> ProcessExit | None:
        """A process that is to be started again, while the others go on."""
        is_new = len(seen.interrupts) > self._interrupts_taken
        goes_on = self.phase in (Phase.RUNNING, Phase.STOPPING)
        if not goes_on or is_new or not self.restarts_left:
            return None
        lost = next((one for one in seen.exits if one.may_restart_alone), None)
        if lost is not None:
            self.restarted += 1
            self._goodbye_seen_at.pop(lost.member, None)
        return lost

    def to_continue_without(self, seen: Observation) -> ProcessExit | None:
        """A process that has just ended, and without which the others go on."""
        if self.phase is not Phase.RUNNING:
            return None
        known = {one.member for one in self.continued_without}
        ended = [one for one in seen.exits if one.status and one.member not in known]
        lost = next((one for one in ended if one.reported.expendable or one.is_done), None)
        self.continued_without += [] if lost is None else [lost]
        return lost

    @property
    def is_over(self) -> bool:
        """True when nothing of the gang runs any more."""
        return self.phase is Phase.OVER

    def step(self, seen: Observation) -> int | None:
        """The signal to send now, if any, to all or to those who are `asked`."""
        self.asked = ()
        is_new = len(seen.interrupts) > self._interrupts_taken
        if is_new and self.phase in (Phase.RUNNING, Phase.SETTLING, Phase.LEAVING):
            return self._interrupt(seen)
        decide = {
            Phase.RUNNING: self._run,
            Phase.SETTLING: self._settle,
            Phase.LEAVING: self._leave,
            Phase.STOPPING: self._stop,
            Phase.ENDING: self._end,
        }
        return decide[self.phase](seen) if self.phase in decide else None

    def _run(self, seen: Observation) -> int | None:
        if any(one.has_failed for one in seen.exits):
            self._enter(Phase.SETTLING, seen)
            return self._settle(seen)
        if any(one.stop for one in seen.exits):
            # workers tell each other: somebody else was asked to stop
            self._enter(Phase.STOPPING, seen)
            return self._stop(seen)
        if seen.elsewhere is RemoteState.STOP:
            return self._begin_end(Verdict.STOPPED, seen)
        if self._workers_done(seen) and seen.elsewhere is RemoteState.DONE:
            self._enter(Phase.LEAVING, seen)
            return self._leave(seen)
        return None

    def _settle(self, seen: Observation) -> int | None:
        first = first_failure(seen.exits)
        assert first is not None
        patience_s = EXIT_S if seen.leaving else SETTLE_S
        if first.is_root_cause or self._all_exited(seen) or seen.now - self._since >= patience_s:
            self.failure = first
            return self._begin_end(Verdict.FAILED, seen)
        return None

    def _leave(self, seen: Observation) -> int | None:
        if any(one.has_failed for one in seen.exits):
            self._enter(Phase.SETTLING, seen)
            return self._settle(seen)
        if self._all_exited(seen):
            self._enter(Phase.OVER, seen)
        elif seen.now - self._since >= LEAVE_S:
            self.ended_servers = True
            return self._begin_end(self.verdict, seen)
        return None

    def _stop(self, seen: Observation) -> int | None:
        """Workers save and end; servers, which hold what is saved, end behind them."""
        if not self.signal and seen.interrupts:
            # they know it already, from those of another machine
            self.signal, self._interrupts_taken = seen.interrupts[0], len(seen.interrupts)
        waited, again = seen.now - self._since, len(seen.interrupts) > self._interrupts_taken
        done = self._workers_done(seen) if self._workers else self._all_exited(seen)
        if again or waited >= self._stop_s or any(one.has_failed for one in seen.exits):
            self.stop_failed, self._killed = True, True
            self.failure = first_failure(seen.exits)
            self._begin_end(Verdict.INTERRUPTED, seen)
            return None if self.is_over else signal.SIGKILL
        if done:
            self.stop = _first_stop(seen.exits)
            self.verdict = Verdict.SUCCESS if self.stop is None else Verdict.SAVED
            self._enter(Phase.LEAVING, seen)
            return self._leave(seen)
        return None

    def _end(self, seen: Observation) -> int | None:
        waited = seen.now - self._since
        again = len(seen.interrupts) > self._interrupts_taken
        if self._all_exited(seen) or waited >= self._grace_s + UNKILLABLE_S:
            self._enter(Phase.OVER, seen)
        elif not self._killed and (again or waited >= self._grace_s):
            self._killed = True
            return signal.SIGKILL
        elif self._may_be_noted and seen.can_stop and waited >= FIRST_SIGTERM_S:
            self._may_be_noted = False
            return signal.SIGTERM
        return None

    def _interrupt(self, seen: Observation) -> int | None:
        self.signal = seen.interrupts[self._interrupts_taken]
        if self.verdict is Verdict.SAVED:
            return self._begin_end(self.verdict, seen, self.signal)
        if self.phase is Phase.RUNNING and self.signal == signal.SIGTERM and seen.can_stop:
            self._interrupts_taken = len(seen.interrupts)
            self._enter(Phase.STOPPING, seen)
            self.asked = (Kind.WORKER,) if self._workers else (Kind.SERVER,)
            return signal.SIGTERM
        return self._begin_end(Verdict.INTERRUPTED, seen, self.signal)

    def _begin_end(
        self, verdict: Verdict, seen: Observation, number: int = signal.SIGTERM
    ) -> int | None:
        self.verdict = verdict
        self._interrupts_taken = len(seen.interrupts)
        if self._all_exited(seen):
            self._enter(Phase.OVER, seen)
            return None
        self._enter(Phase.ENDING, seen)
        self._may_be_noted = number == signal.SIGTERM
        return number

    def _enter(self, phase: Phase, seen: Observation) -> None:
        self.phase = phase
        self._since = seen.now

    def _workers_done(self, seen: Observation) -> bool:
        ended = sum(1 for one in seen.exits if one.member.kind is Kind.WORKER)
        return ended == self._workers

    def _all_exited(self, seen: Observation) -> bool:
        return len(seen.exits) == len(self._members)


def _as_departed(one: ProcessExit) -> ProcessExit:
    """It has said goodbye: nobody is there whom another life of it could call."""
    reported = msgspec.structs.replace(one.reported, left_job=True, restartable=False)
    return dataclasses.replace(one, reported=reported)


def _with_saved_stop(exits: Sequence[ProcessExit]) -> Sequence[ProcessExit]:
    """Servers miss the goodbye of a worker that was killed behind its stop, and fail: it has saved.

    So this is an end of theirs like any other of a job that has stopped.
    """
    killed = (one.stop for one in exits if one.stop is not None and is_killed(one.status))
    stop = next(killed, None)
    return [
        dataclasses.replace(one, stop=stop)
        if stop is not None and _failed_without_goodbye(one)
        else one
        for one in exits
    ]


def _failed_without_goodbye(one: ProcessExit) -> bool:
    return one.member.kind is Kind.SERVER and one.has_failed and one.reported.caused_by_peer


def _first_stop(exits: Sequence[ProcessExit]) -> Stop | None:
    """The stop of worker 0, or of the next process: servers count no steps."""
    order = sorted(exits, key=lambda one: (one.member.kind is not Kind.WORKER, one.member.index))
    return next((one.stop for one in order if one.stop is not None), None)
