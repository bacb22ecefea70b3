# SPDX-License-Identifier: Apache-2.0
"""`ElasticScript`: a job that workers join and leave, and its accidents. Drawn, then fixed."""

import dataclasses
import random
from collections.abc import Sequence

from tests.chaos.simulation.script import ASYNC, SSP, SYNC

from fleetlight.ps.plan import InitializerPlan, OptimizerPlan, Plan, RulePlan, TablePlan

#: the usual time of accidents
BUSY_S = 40.0


@dataclasses.dataclass(frozen=True)
class ElasticScript:
    """One schedule, before anything has happened."""

    mode: str
    #: workers that start with the job, and places
    workers: int
    places: int
    servers: int
    staleness: int | None
    log: bool
    epochs: int
    records: int
    batch: int
    range_batches: int
    #: barriers before the first batch, and after each epoch
    first_barriers: int
    gathers: bool
    rests: bool
    #: by worker of the start: how long servers wait for it if it is away
    away_s: Sequence[float]
    #: times
    joins: Sequence[float]
    leaves: Sequence[float]
    deaths: Sequence[float]
    breaks: Sequence[float]
    cuts: Sequence[float]
    server_deaths: Sequence[float]
    snapshots: Sequence[float]
    #: how long a message takes at most, and a batch
    delay_s: float
    batch_s: float
    #: a server whose requests take longer, and how long; -1: none
    slow_server: int
    slow_s: float
    nervous: float

    def plan(self) -> Plan:
        """The plan of the servers."""
        table = TablePlan("rows", 1, RulePlan("sgd", {}), InitializerPlan("zeros"), 0, 0)
        return Plan(
            mode=ASYNC if self.mode == SSP else self.mode,
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


def draw(chance: random.Random) -> ElasticScript:
    """Any script."""
    mode = chance.choice((SYNC, SYNC, ASYNC, SSP))
    workers = chance.choice((1, 2, 2, 3))
    log = chance.random() < 0.7

    def times(*counts: int) -> list[float]:
        return sorted(chance.random() * BUSY_S for _ in range(chance.choice(counts)))

    return ElasticScript(
        mode=mode,
        workers=workers,
        places=chance.randrange(workers + (workers == 1), 6),
        servers=2,
        staleness=chance.randrange(3) if mode == SSP else None,
        log=log,
        epochs=chance.choice((2, 2, 3)),
        records=chance.randrange(6, 20),
        batch=chance.choice((1, 2, 2)),
        range_batches=chance.choice((1, 2, 4)),
        first_barriers=chance.choice((0, 1)),
        gathers=chance.random() < 0.5,
        rests=chance.random() < 0.4,
        # a job needs its first worker
        away_s=[1e6, *(chance.choice((0.0, 15.0)) for _ in range(workers - 1))],
        joins=times(1, 1, 2, 3, 5),
        leaves=times(0, 0, 1, 2),
        deaths=times(0, 0, 1, 2),
        breaks=times(0, 0, 1, 3),
        cuts=times(0, 0, 0, 1),
        server_deaths=times(0, 1, 1, 2, 3) if log else [],
        snapshots=times(0, 1, 2) if log else [],
        delay_s=chance.choice((0.3, 0.3, 1.0, 3.0)),
        batch_s=chance.choice((0.1, 0.5, 2.0, 6.0)),
        slow_server=chance.choice((-1, -1, 0, 1)),
        slow_s=chance.choice((2.0, 8.0)),
        nervous=chance.choice((0.0, 0.0, 0.03)),
    )
