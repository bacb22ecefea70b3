# SPDX-License-Identifier: Apache-2.0
"""`Script`: the actions of the workers of one schedule, and its accidents. Drawn, then fixed."""

import dataclasses
import itertools
import random
from collections.abc import Sequence

from fleetlight.ps.plan import InitializerPlan, OptimizerPlan, Plan, RulePlan, TablePlan

SYNC, ASYNC, SSP, GEO = "sync", "async", "ssp", "geo"
#: one in so many servers' rows is the busiest
_IDS = 3


@dataclasses.dataclass(frozen=True)
class Update:
    """One push of one worker."""

    #: the column of the rows that counts this update
    column: int
    worker: int
    incarnation: int
    phase: int
    #: its number among the worker's updates in the phase
    number: int
    #: by server
    ids: Sequence[Sequence[int]]
    #: a worker's loss scaler has found an infinity
    skips: bool
    #: sync: the gradients are held until their norm is known
    holds: bool
    #: geo: another piece of the same exchange follows
    more: bool = False


@dataclasses.dataclass(frozen=True)
class Script:
    """One schedule, before anything has happened."""

    mode: str
    workers: int
    servers: int
    staleness: int | None
    #: changes are written down before they are acknowledged
    log: bool
    #: by worker, by phase
    updates: Sequence[Sequence[Sequence[Update]]]
    #: how many connections break
    breaks: int
    #: incarnations of servers that end
    deaths: int
    #: a worker disconnects without leaving the job
    loses_worker: bool
    #: servers die, and a worker is started a second time while its first process still runs
    doubles_worker: bool
    #: servers die, and a worker with them, which restarts and resumes from its disk
    returns_worker: bool
    snapshots: int
    nervous: float
    merges: bool
    #: by phase: the updates of the second process of worker 0
    second: Sequence[Sequence[Update]] = ()

    @property
    def everything(self) -> list[Update]:
        """All updates, in the order of their columns."""
        processes = [*self.updates, self.second]
        found = [update for phases in processes for phase in phases for update in phase]
        return sorted(found, key=lambda update: update.column)

    @property
    def width(self) -> int:
        """How many updates there are."""
        return len(self.everything)

    def of(self, worker: int, incarnation: int) -> Sequence[Sequence[Update]]:
        """The updates of a process, by phase."""
        return self.updates[worker] if incarnation == 1 else self.second

    @property
    def ends_badly(self) -> bool:
        """True where a worker may get an error."""
        return self.loses_worker or self.doubles_worker

    def group(self, update: Update) -> list[Update]:
        """The updates that make one step with it."""
        if self.mode != SYNC:
            return [update]
        phases = [phases[update.phase] for phases in self.updates if phases]
        return [mine[update.number] for mine in phases if len(mine) > update.number]

    def is_skipped(self, update: Update) -> bool:
        """True for an update that changes nothing."""
        return any(one.skips for one in self.group(update))

    def plan(self) -> Plan:
        """The plan of the servers."""
        mode = ASYNC if self.mode == SSP else self.mode
        table = TablePlan("rows", self.width, RulePlan("sgd", {}), InitializerPlan("zeros"), 0, 0)
        return Plan(
            mode=mode,
            worker_num=self.workers,
            server_num=self.servers,
            seed=0,
            tables=[table],
            dense=[],
            optimizers=[OptimizerPlan("SGD", 1, True)],
            staleness=self.staleness,
            on_nonfinite="apply",
            durability="log" if self.log else "none",
        )


def draw(chance: random.Random) -> Script:
    """Any script."""
    mode = chance.choice((SYNC, SYNC, ASYNC, SSP, GEO))
    workers, servers = chance.choice((1, 2, 2, 2, 3)), chance.choice((1, 1, 2))
    accident = chance.random()
    log = accident > 0.2
    doubles = mode == ASYNC and accident > 0.6
    updates = _updates(chance, mode, workers, servers)
    second = _again(updates) if doubles else []
    returns = log and not doubles and 0.3 < accident < 0.5
    holds = any(update.holds for phases in updates for phase in phases for update in phase)
    return Script(
        mode=mode,
        workers=workers,
        servers=servers,
        staleness=chance.randrange(3) if mode == SSP else None,
        log=log,
        updates=updates,
        breaks=chance.choice((0, 0, 1, 3)),
        deaths=2 if doubles else chance.choice((0, 1, 1, 2, 3)) if log else 0,
        loses_worker=accident < 0.04 or 0.2 < accident < 0.25,
        doubles_worker=doubles,
        # what is held of a step is not on a worker's disk
        returns_worker=returns and not holds,
        snapshots=chance.choice((0, 1, 2)) if log else 0,
        nervous=chance.choice((0.0, 0.0, 0.03, 0.08)),
        merges=chance.random() < 0.3,
        second=second,
    )


def _updates(
    chance: random.Random, mode: str, workers: int, servers: int
) -> list[list[list[Update]]]:
    phases, column = chance.choice((1, 1, 2)), 0
    made: list[list[list[Update]]] = [[[] for _ in range(phases)] for _ in range(workers)]
    for phase in range(phases):
        most = chance.randrange(1, 4)
        holds = [mode == SYNC and chance.random() < 0.2 for _ in range(most)]
        for worker in range(workers):
            count = most if chance.random() < 0.7 else chance.randrange(most + 1)
            for number in range(count):
                ids = [_ids(chance, server) for server in range(servers)]
                skips = mode != GEO and chance.random() < 0.08
                more = mode == GEO and number + 1 < count and chance.random() < 0.3
                update = Update(column, worker, 1, phase, number, ids, skips, holds[number], more)
                made[worker][phase].append(update)
                column += 1
    return made


def _again(updates: list[list[list[Update]]]) -> list[list[Update]]:
    """The updates of a second process of worker 0: the same rows, in their own columns."""
    numbers = itertools.count(sum(len(phase) for phases in updates for phase in phases))
    return [
        [dataclasses.replace(one, column=next(numbers), incarnation=2) for one in phase]
        for phase in updates[0]
    ]


def _ids(chance: random.Random, server: int) -> list[int]:
    """One or two rows of a server."""
    first = chance.randrange(_IDS)
    ids = [first] if chance.random() < 0.6 else [first, (first + 1) % _IDS]
    return [10 * server + one for one in ids]
