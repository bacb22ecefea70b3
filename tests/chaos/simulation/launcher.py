# SPDX-License-Identifier: Apache-2.0
"""One schedule of a launcher: `Watch` decides about processes that are drawn."""

import dataclasses
import signal

from tests.chaos.simulation.oracle import broken
from tests.chaos.simulation.world import World

from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.failure import ProcessExit
from fleetlight.launch.processes.watch import (
    EXIT_S,
    LEAVE_S,
    SETTLE_S,
    UNKILLABLE_S,
    Observation,
    Phase,
    RemoteState,
    Verdict,
    Watch,
)
from fleetlight.launch.status import ProcessStatus
from fleetlight.roles.role import Kind

_GRACE_S, _TICK_S = 3.0, 0.5
#: after the last event that happens on its own
_LATE_S = 12.0
#: servers never end on their own
_NEVER = 1e9


@dataclasses.dataclass
class _Process:
    member: JobProcess
    #: when it ends on its own, and how
    ends_at: float
    status: int
    returns: bool
    #: seconds from SIGTERM to its end; some never end
    obeys_s: float
    exit: ProcessExit | None = None
    asked: bool = False


class Launched:
    """Processes, their launcher, and interrupts."""

    def __init__(self, world: World) -> None:
        self.world, chance = world, world.chance
        workers, servers = chance.randrange(1, 4), chance.randrange(3)
        counts = ((Kind.SERVER, servers), (Kind.WORKER, workers))
        self.processes = [
            self._process(JobProcess(kind=kind, index=n, of=of, local_rank=n, local_size=of))
            for kind, of in counts
            for n in range(of)
        ]
        self.max_restarts = chance.choice((0, 0, 1, 3))
        self.watch = Watch([one.member for one in self.processes], _GRACE_S, self.max_restarts)
        draws = chance.random()
        self.interrupts = sorted(
            chance.random() * _LATE_S for _ in range(2 if draws < 0.1 else draws < 0.25)
        )
        self.stops_at = chance.random() * _LATE_S if chance.random() < 0.1 else _NEVER
        self.signals: list[int] = []

    def _process(self, member: JobProcess) -> _Process:
        chance = self.world.chance
        fails = chance.random() < 0.2
        status = chance.choice((1, 3, -9, -6, -11)) if fails else 0
        ends = chance.random() * 10 if fails or member.kind is Kind.WORKER else _NEVER
        return _Process(
            member,
            ends,
            status,
            status == -9 and member.kind is Kind.SERVER,
            chance.choice((0.0, 0.5, 2.0, _NEVER)),
        )

    def run(self) -> None:
        """Run it to the end; raises a violation."""
        world = self.world
        longest = _LATE_S + max(SETTLE_S, EXIT_S) + LEAVE_S + _GRACE_S + UNKILLABLE_S + 5 * _TICK_S
        while not self.watch.is_over:
            world.now += _TICK_S * world.chance.random()
            if world.now > longest:
                raise broken("waiting", f"the launcher does, in {self.watch.phase}")
            self._live()
            seen = self._seen()
            if (lost := self.watch.to_restart(seen)) is not None:
                self._revive(lost)
            number = self.watch.step(self._seen())
            if number is not None:
                self._signal(number)
        self._look()

    def _live(self) -> None:
        for one in self.processes:
            if one.exit is None and one.ends_at <= self.world.now:
                self.world.tell(str(one.member), f"ends with {one.status}")
                one.exit = ProcessExit(
                    member=one.member,
                    status=one.status,
                    at=one.ends_at,
                    reported=ProcessStatus(restartable=one.returns and not one.asked),
                )

    def _seen(self) -> Observation:
        now = self.world.now
        return Observation(
            now=now,
            exits=[one.exit for one in self.processes if one.exit is not None],
            interrupts=[signal.SIGINT for at in self.interrupts if at <= now],
            remote=RemoteState.STOP if self.stops_at <= now else RemoteState.DONE,
        )

    def _revive(self, lost: ProcessExit) -> None:
        (process,) = [one for one in self.processes if one.exit is lost]
        self.world.tell(str(process.member), "is started again")
        if self.watch.restarted > self.max_restarts:
            raise broken(
                "gang", f"{self.watch.restarted} were started again, of {self.max_restarts}"
            )
        process.exit = None
        process.ends_at = self.world.now + self.world.chance.random() * 5
        if self.world.chance.random() < 0.5:
            process.ends_at, process.status, process.returns = _NEVER, 0, False

    def _signal(self, number: int) -> None:
        self.world.tell("the launcher", f"sends {signal.Signals(number).name}")
        if number == signal.SIGKILL and not self.signals:
            raise broken("gang", "SIGKILL came first")
        self.signals.append(number)
        for one in self.processes:
            if one.exit is None and not one.asked:
                one.asked = True
                one.ends_at = min(one.ends_at, self.world.now + one.obeys_s)
                one.status = one.status or -number
            if number == signal.SIGKILL:
                one.ends_at = min(one.ends_at, self.world.now)

    def _look(self) -> None:
        watch, alive = self.watch, [one for one in self.processes if one.exit is None]
        if alive:
            raise broken("gang", f"{watch.verdict}, while {alive} run")
        if watch.phase is not Phase.OVER or self.signals.count(signal.SIGKILL) > 1:
            raise broken("gang", f"{watch.phase} after {self.signals}")
        failed = [one for one in self.processes if one.exit is not None and one.exit.status]
        if (watch.verdict is Verdict.FAILED) != (watch.failure is not None):
            raise broken("gang", f"{watch.verdict} for {watch.failure}")
        if watch.verdict is Verdict.SUCCESS and any(
            one.member.kind is Kind.WORKER for one in failed
        ):
            raise broken("gang", f"success, but {failed} failed")
        if watch.verdict is Verdict.INTERRUPTED and not self.interrupts:
            raise broken("gang", "interrupted by no signal")
