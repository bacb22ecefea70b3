# SPDX-License-Identifier: Apache-2.0
"""The figures that the processes of a probe write down, and the workload that they show; pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import msgspec

from fleetlight.errors import ConfigError
from fleetlight.launch.capacity.prediction import alone_s
from fleetlight.launch.capacity.profile import GEO, SYNC, Lane, Line, Workload

#: a probe counts these steps only after some seconds, since kernels are loaded in the first ones
WARM_S, WARM_STEPS = 1.0, 10
#: and for so long
COUNTED_S, COUNTED_STEPS = 3.0, 20
#: exchanges of GeoSGD that it must see
_EXCHANGES = 3
#: lanes whose replies training does not wait for, by mode
_PULL, _PUSH, _PREFETCH = "pull", "push", "prefetch"
#: lanes that move the values of steps
STEP_LANES = (_PULL, _PUSH, _PREFETCH)


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a worker at one time of the monotonic clock."""

    at: float
    cpu_s: float
    #: CPU seconds of all programs of the machine
    busy_s: float
    #: how long the training thread was ready and had no core
    ready_s: float
    memory: int
    mode: str
    k_steps: int
    #: tables, each of which a forward pulls by a request of its own
    tables: int
    steps: int
    #: examples of the present batch; None outside a sharded loader
    batch: int | None
    #: by lane: bytes sent and received
    lanes: dict[str, tuple[int, int]]
    #: times between two steps: how many, their sum, and that of their squares
    intervals: tuple[int, float, float]


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a server at one time of the monotonic clock."""

    at: float
    cpu_s: float
    #: how long its threads were ready and had no core
    ready_s: float
    memory: int
    rows: int
    row_bytes: int


@dataclasses.dataclass(frozen=True)
class Observed:
    """The samples of one probe: of its worker, and of each of its servers."""

    worker: Sequence[WorkerSample]
    servers: Sequence[Sequence[ServerSample]]

    def window(self) -> tuple[WorkerSample, WorkerSample] | None:
        """The first and the last sample of the counted steps; None while there are too few."""
        warm = _first_warm(self.worker)
        if warm is None:
            return None
        last = self.worker[-1]
        steps = max(COUNTED_STEPS, _EXCHANGES * last.k_steps if last.mode == GEO else 0)
        enough = last.at - warm.at >= COUNTED_S and last.steps - warm.steps >= steps
        return (warm, last) if enough else None


def _first_warm(samples: Sequence[WorkerSample]) -> WorkerSample | None:
    trained = [sample for sample in samples if sample.steps > 0]
    for sample in trained:
        if sample.at - trained[0].at >= WARM_S and sample.steps >= WARM_STEPS:
            return sample
    return None


@dataclasses.dataclass(frozen=True)
class _Costs:
    """What a step cost in one probe."""

    servers: int
    #: without the time in which other programs had the cores
    wall_s: float
    worker_cpu_s: float
    server_cpu_s: float
    lanes: dict[str, tuple[float, float]]


def workload_of(few: Observed, many: Observed) -> Workload:
    """The workload of a script, from a probe with one server and one with several."""
    costs = [_costs(few), _costs(many)]
    last = few.worker[-1]
    work = Workload(
        mode=last.mode,
        batch=_batch(few.worker),
        worker_cpu_s=_line(costs, lambda one: one.worker_cpu_s),
        server_cpu_s=_line(costs, lambda one: one.server_cpu_s),
        idle_s=0.0,
        spread=_spread(few),
        lanes={name: _lane(name, costs, last) for name in costs[0].lanes},
        connections=len(last.lanes),
        rows=_rows(few),
        row_bytes=sum(of[-1].row_bytes for of in few.servers) / max(1, _rows(few)),
        server_bytes=_server_bytes(few),
        worker_bytes=last.memory,
    )
    return msgspec.structs.replace(work, idle_s=max(0.0, costs[0].wall_s - alone_s(work)))


def other_programs(probes: Sequence[Observed], cores: int) -> float:
    """The share of the machine that other programs used, in the probe where it was largest."""
    return max(_other_programs(observed, cores) for observed in probes)


def _other_programs(observed: Observed, cores: int) -> float:
    first, last = _window(observed)
    own_s = last.cpu_s - first.cpu_s
    own_s += sum(_grown(of, lambda s: s.cpu_s, first.at, last.at) for of in observed.servers)
    share = (last.busy_s - first.busy_s - own_s) / (cores * (last.at - first.at))
    return min(1.0, max(0.0, share))


def _window(observed: Observed) -> tuple[WorkerSample, WorkerSample]:
    window = observed.window()
    assert window is not None, "the probe ended too early"
    return window


def _costs(observed: Observed) -> _Costs:
    first, last = _window(observed)
    steps = last.steps - first.steps
    cpu_s, ready_s = (
        sum(_grown(of, counter, first.at, last.at) for of in observed.servers)
        for counter in (lambda sample: sample.cpu_s, lambda sample: sample.ready_s)
    )
    return _Costs(
        len(observed.servers),
        (last.at - first.at - (last.ready_s - first.ready_s) - ready_s) / steps,
        (last.cpu_s - first.cpu_s) / steps,
        cpu_s / steps,
        {name: _moved(name, first, last, steps) for name in STEP_LANES if name in last.lanes},
    )


def _moved(lane: str, first: WorkerSample, last: WorkerSample, steps: int) -> tuple[float, float]:
    before, after = first.lanes.get(lane, (0, 0)), last.lanes[lane]
    if after == (0, 0):
        raise ConfigError(
            "this system does not count the bytes of a connection, expected Linux: measure there, "
            "and give the file to fleetlight plan --profile"
        )
    return (after[0] - before[0]) / steps, (after[1] - before[1]) / steps


def _grown(
    samples: Sequence[ServerSample],
    counter: Callable[[ServerSample], float],
    start: float,
    end: float,
) -> float:
    """How much a counter of a server has grown between two times."""
    return _at(samples, counter, end) - _at(samples, counter, start)


def _at(
    samples: Sequence[ServerSample], counter: Callable[[ServerSample], float], at: float
) -> float:
    """A counter at a time between two samples."""
    before = max((s for s in samples if s.at <= at), key=lambda s: s.at, default=samples[0])
    after = min((s for s in samples if s.at >= at), key=lambda s: s.at, default=samples[-1])
    if after.at <= before.at:
        return counter(before)
    share = (at - before.at) / (after.at - before.at)
    return counter(before) + share * (counter(after) - counter(before))


def _line(costs: Sequence[_Costs], cost: Callable[[_Costs], float]) -> Line:
    """The line through two probes; a cost never falls with more servers, except by noise."""
    few, many = costs
    rise = (cost(many) - cost(few)) / (many.servers - few.servers)
    per_server = min(max(0.0, rise), cost(few))
    return Line(cost(few) - per_server * few.servers, per_server)


def _lane(name: str, costs: Sequence[_Costs], last: WorkerSample) -> Lane:
    overlaps = name == _PREFETCH or (name == _PUSH and last.mode != SYNC)
    # where all rows are prefetched, nothing is pulled on demand
    moves = any(one.lanes[name][0] > 0 for one in costs)
    return Lane(
        sent=_line(costs, lambda one: one.lanes[name][0]),
        received=_line(costs, lambda one: one.lanes[name][1]),
        overlaps=overlaps,
        round_trips=moves * (last.tables if name == _PULL else 1),
    )


def _batch(samples: Sequence[WorkerSample]) -> float | None:
    # the last batch of an epoch is shorter
    return max((sample.batch for sample in samples if sample.batch is not None), default=None)


def _spread(observed: Observed) -> float:
    """The deviation of the time of a step, as a share of it."""
    first, last = (sample.intervals for sample in _window(observed))
    count, total, squares = last[0] - first[0], last[1] - first[1], last[2] - first[2]
    if count < 2 or total <= 0:
        return 0.0
    mean = total / count
    return math.sqrt(max(0.0, squares / count - mean * mean)) / mean


def _rows(observed: Observed) -> int:
    return sum(of[-1].rows for of in observed.servers)


def _server_bytes(observed: Observed) -> float:
    """The memory of a server without its tables."""
    return max(0.0, max(of[-1].memory - of[-1].row_bytes for of in observed.servers))
