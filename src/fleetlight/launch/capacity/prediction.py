# SPDX-License-Identifier: Apache-2.0
"""Predict a job of any size from what one step costs; pure.

A worker repeats one cycle: it computes, waits for the lanes that training waits for, and meanwhile
its other lanes move bytes. Each resource is shared by some workers. A worker that arrives at a busy
resource waits; a full resource sets the pace of all (`waiting.py`).
"""

from __future__ import annotations

import dataclasses
import math

from fleetlight.launch.capacity.profile import SYNC, Lane, Workload
from fleetlight.launch.capacity.waiting import Resource, Stage, paced, together

#: what may limit a job
WORKER_CPU, SERVER_CPU, SHARED_CPU, LINK = "worker CPU", "server CPU", "shared CPU", "link"
ROUND_TRIPS, SLOWEST = "round trips", "slowest worker"
#: the resources
_WORKER, _SERVER, _SHARED = WORKER_CPU, SERVER_CPU, SHARED_CPU
_UP, _DOWN = "link of a worker", "link of a worker, replies"
_SERVER_UP, _SERVER_DOWN = "link of a server", "link of a server, replies"

#: the part of a link that carries payload: headers of Ethernet, IP and TCP take the rest
_PAYLOAD = 1448 / 1514
#: cores that one server keeps busy: its threads share one interpreter
SERVER_CORES = 1.0
#: bytes of a server for each connection, measured: a thread and its socket
CONNECTION_BYTES = 27 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How many processes there are, and what they share."""

    workers: int
    servers: int
    #: workers of one host; each server has a host of its own
    workers_per_host: int = 1
    cores: int = 1
    #: the speed of each host's link in each direction; infinite: not limited
    link_bits_per_s: float = math.inf
    round_trip_s: float = 0.0
    #: cores of all hosts together, where hosts share them
    total_cores: float | None = None
    #: rows of all tables; None: those that the probe made
    rows: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a job of one layout reaches."""

    layout: Layout
    step_s: float
    steps_per_s: float
    #: None if the batch size is not known
    examples_per_s: float | None
    #: what most of the time of a step goes to
    limit: str
    #: bytes that a worker sends and receives in a step
    sent_bytes: float
    received_bytes: float
    #: by resource: the share of its capacity in use
    use: dict[str, float]
    #: bytes of memory of each server, and connections to each
    server_bytes: float
    connections: int


def predict(work: Workload, layout: Layout) -> Prediction:
    """The speed, traffic and memory of a job."""
    job = _Job(work, layout)
    step_s, limit = job.step()
    rate = layout.workers / step_s
    connections = work.connections * layout.workers
    return Prediction(
        layout=layout,
        step_s=step_s,
        steps_per_s=rate,
        examples_per_s=None if work.batch is None else rate * work.batch,
        limit=limit,
        sent_bytes=job.sent,
        received_bytes=job.received,
        use={name: min(1.0, one.full_s / step_s) for name, one in job.resources().items()},
        server_bytes=_server_bytes(work, layout, job.sent + job.received, connections),
        connections=connections,
    )


def alone_s(work: Workload) -> float:
    """A step of one worker with one server and links without limit."""
    return _Job(work, Layout(workers=1, servers=1)).step()[0]


def _server_bytes(work: Workload, layout: Layout, moved: float, connections: int) -> float:
    rows = work.rows if layout.rows is None else layout.rows
    tables = rows * work.row_bytes / layout.servers
    # each connection keeps its last request and the last reply
    held = layout.workers * moved / layout.servers
    return work.server_bytes + tables + held + connections * CONNECTION_BYTES


class _Job:
    """One workload in one layout."""

    def __init__(self, work: Workload, layout: Layout) -> None:
        self._work, self._layout, self._servers = work, layout, layout.servers
        self._worker_s = work.worker_cpu_s.at(layout.servers)
        self._server_s = work.server_cpu_s.at(layout.servers) / layout.servers
        self._payload = layout.link_bits_per_s / 8 * _PAYLOAD
        self.sent = sum(lane.sent.at(layout.servers) for lane in work.lanes.values())
        self.received = sum(lane.received.at(layout.servers) for lane in work.lanes.values())

    def resources(self) -> dict[str, Resource]:
        """What workers share."""
        layout = self._layout
        every, beside = layout.workers, min(layout.workers, layout.workers_per_host)
        sent_s, received_s = self.sent / self._payload, self.received / self._payload
        found = {
            _WORKER: Resource(WORKER_CPU, self._worker_s, beside, layout.cores),
            _SERVER: Resource(SERVER_CPU, self._server_s, every, min(SERVER_CORES, layout.cores)),
            _UP: Resource(LINK, sent_s, beside, 1),
            _DOWN: Resource(LINK, received_s, beside, 1),
            _SERVER_UP: Resource(LINK, sent_s / layout.servers, every, 1),
            _SERVER_DOWN: Resource(LINK, received_s / layout.servers, every, 1),
        }
        if layout.total_cores is not None:
            all_s = self._worker_s + self._server_s * layout.servers
            found[_SHARED] = Resource(SHARED_CPU, all_s, every, layout.total_cores)
        return found

    def step(self) -> tuple[float, str]:
        """The seconds of a step, and what limits it."""
        paths, resources = [self._serial(), self._beside()], self.resources()
        if self._work.mode == SYNC:
            return together(paths, resources, self._slowest())
        return paced(paths, resources)

    def _serial(self) -> list[Stage]:
        """What training does and waits for, one after the other."""
        compute = Stage(WORKER_CPU, self._cpu(_WORKER, self._worker_s))
        idle = Stage(ROUND_TRIPS, {}, self._work.idle_s)
        return [compute, idle, *self._stages(overlaps=False)]

    def _beside(self) -> list[Stage]:
        """What is done meanwhile."""
        return self._stages(overlaps=True)

    def _stages(self, *, overlaps: bool) -> list[Stage]:
        lanes = [lane for lane in self._work.lanes.values() if lane.overlaps == overlaps]
        return [stage for lane in lanes for stage in self._stages_of(lane)]

    def _stages_of(self, lane: Lane) -> list[Stage]:
        """The requests of a lane reach the servers, are served, and the replies return."""
        sent, received = lane.sent.at(self._servers), lane.received.at(self._servers)
        share = (sent + received) / max(1.0, self.sent + self.received)
        return [
            Stage(LINK, self._link(_UP, _SERVER_UP, sent)),
            Stage(SERVER_CPU, self._cpu(_SERVER, self._server_s * share)),
            Stage(LINK, self._link(_DOWN, _SERVER_DOWN, received)),
            Stage(ROUND_TRIPS, {}, lane.round_trips * self._layout.round_trip_s),
        ]

    def _link(self, own: str, servers: str, moved: float) -> dict[str, float]:
        seconds = moved / self._payload
        return {own: seconds, servers: seconds / self._servers}

    def _cpu(self, name: str, seconds: float) -> dict[str, float]:
        shared = {} if self._layout.total_cores is None else {_SHARED: seconds}
        return {name: seconds, **shared}

    def _slowest(self) -> Stage:
        """How much later than the mean the slowest of all workers ends its computation."""
        deviation = self._work.spread * self._worker_s
        wait = deviation * math.sqrt(2 * math.log(self._layout.workers))
        return Stage(SLOWEST, {}, wait)
