# SPDX-License-Identifier: Apache-2.0
"""A queueing model of jobs with parameter servers, beside real jobs on hosts of network namespaces.

Two short runs tell what a step costs; the model then predicts jobs of other sizes, and names what
limits them. The check runs all layouts on hosts with shaped links, which share the cores of this
machine; it requires root, `ip` and `tc`. `--plan example` only predicts, for the example of
docs/scaling.md; `--plan MODEL:MODE` measures that model first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

from rig.hosts import Rig, hosts

from benchmarks import interleave, jobs, machine, report
from benchmarks.peers.ps_timed import BATCH
from benchmarks.ps import TITLES, Ours, rate

AT_MOST = 0.15
CLAIM = (
    "The examples per second of a job with parameter servers are predicted from two short runs: "
    "with 1 to 16 workers and 1 to 4 servers, on links of 1 Gbit/s and 200 Mbit/s, the median "
    f"error is at most {AT_MOST:.0%}. All hosts share the cores of one machine."
)

# -- what a step costs


@dataclasses.dataclass(frozen=True)
class Line:
    """A cost of one step that grows with the number of servers."""

    fixed: float
    per_server: float = 0.0

    def at(self, servers: int) -> float:
        """The cost with this number of servers."""
        return self.fixed + self.per_server * servers


@dataclasses.dataclass(frozen=True)
class Lane:
    """The bytes of one step on one kind of connection, to all servers and from them."""

    sent: Line
    received: Line
    #: False if training waits for the replies
    overlaps: bool
    #: requests of one step to each server, one after the other
    round_trips: int = 1


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step of one worker costs: CPU seconds, its own and of all servers, and bytes."""

    mode: str
    worker_cpu_s: Line
    server_cpu_s: Line
    lanes: Sequence[Lane]
    #: seconds in which neither computes, with one server
    idle_s: float = 0.0
    #: standard deviation of the time of a step, as a share of it
    spread: float = 0.15

    def moved(self, servers: int) -> tuple[float, float]:
        """Bytes that a worker sends and receives."""
        sent = sum(lane.sent.at(servers) for lane in self.lanes)
        return sent, sum(lane.received.at(servers) for lane in self.lanes)


#: the Wide&Deep example, async, batch 512, as measured for docs/scaling.md
EXAMPLE = Work(
    "async",
    Line(44.3e-3),
    Line(3.78e-3, 2.18e-3),
    [Lane(Line(0.1e6), Line(1.96e6), True), Lane(Line(1.92e6), Line(0.0), True)],
)

# -- a closed queueing network: each worker repeats one cycle of stages

#: what may limit a job
WORKER_CPU, SERVER_CPU, SHARED_CPU, LINK = "worker CPU", "server CPU", "shared CPU", "link"
ROUND_TRIPS, SLOWEST = "round trips", "slowest worker"
#: the part of a link that carries payload: headers of Ethernet, IP and TCP take the rest
_PAYLOAD = 1448 / 1514
#: cores that one server keeps busy: its threads share one interpreter
_SERVER_CORES = 1.0
#: mean wait behind a user that is being served, as a share of its service
_RESIDUE = 0.5


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many processes there are, and what they share."""

    workers: int
    servers: int
    #: workers of one host; each server has a host of its own
    workers_per_host: int = 1
    cores: int = 1
    #: the speed of each host's link in each direction
    link_bits_per_s: float = math.inf
    round_trip_s: float = 0.0
    #: cores of all hosts together, where hosts share them
    total_cores: float | None = None


@dataclasses.dataclass(frozen=True)
class Resource:
    """Something that several workers use, of which `capacity` at full speed."""

    kind: str
    #: seconds of one cycle of one worker
    seconds: float
    users: int
    capacity: float = 1.0

    @property
    def full_s(self) -> float:
        """A cycle when the resource never rests."""
        return self.seconds * self.users / self.capacity

    def slower(self, cycle_s: float) -> float:
        """How many times as long a worker takes here, in cycles of this length."""
        others = _RESIDUE * (self.users - 1) * self.seconds / (self.capacity * cycle_s)
        return max(1.0, 1 / self.capacity / max(1e-9, 1 - others))


Resources = Mapping[str, Resource]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the cycle: seconds at resources that work at the same time, by their name."""

    kind: str
    seconds: Mapping[str, float]
    #: seconds that no resource shortens
    delay_s: float = 0.0

    def loaded_s(self, resources: Resources, cycle_s: float = math.inf) -> float:
        """The mean time beside the other workers; of one alone without a cycle."""
        times = [t * resources[name].slower(cycle_s) for name, t in self.seconds.items()]
        return max(times, default=0.0) + self.delay_s

    def all_s(self, resources: Resources) -> float:
        """The time of all workers, when they arrive together."""
        shared = {n: max(1.0, r.users / r.capacity) for n, r in resources.items()}
        return max((t * shared[n] for n, t in self.seconds.items()), default=0.0) + self.delay_s


Path = Sequence[Stage]


def paced(paths: Sequence[Path], resources: Resources) -> tuple[float, str]:
    """The cycle of workers that do not wait for each other, and what limits it.

    The paths run beside each other. A longer cycle means less waiting, so there is one solution.
    """

    def longest(cycle_s: float) -> float:
        return max(sum(s.loaded_s(resources, cycle_s) for s in path) for path in paths)

    full = max(resources.values(), key=lambda one: one.full_s)
    low = max(full.full_s, longest(math.inf))
    high = max(sum(s.all_s(resources) for s in path) for path in paths) + low
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if longest(middle) > middle else (low, middle)
    if high <= full.full_s * (1 + 1e-6):
        return full.full_s, full.kind
    path = max(paths, key=lambda path: sum(s.loaded_s(resources, high) for s in path))
    return high, max(path, key=lambda s: s.loaded_s(resources, high)).kind


def together(paths: Sequence[Path], resources: Resources, slowest: Stage) -> tuple[float, str]:
    """The cycle of workers that begin each step together, and what limits it.

    If they shared each stage evenly, the stages would add up. If they passed strictly in turn, only
    the longest kind of stage would queue. Real jobs fall halfway.
    """

    def in_turn_s(path: Path, kind: str) -> float:
        return sum(s.all_s(resources) if s.kind == kind else s.loaded_s(resources) for s in path)

    full = max(resources.values(), key=lambda one: one.full_s)
    path = max(paths, key=lambda path: sum(s.all_s(resources) for s in path))
    evenly = sum(stage.all_s(resources) for stage in path)
    time = (evenly + max(in_turn_s(path, one.kind) for one in path)) / 2 + slowest.delay_s
    if time <= full.full_s:
        return full.full_s, full.kind
    return time, max([*path, slowest], key=lambda stage: stage.all_s(resources)).kind


def predict(work: Work, layout: Layout) -> tuple[float, str, dict[str, float]]:
    """The seconds of a step, what limits it, and the share of each resource in use."""
    every, servers = layout.workers, layout.servers
    beside = min(every, layout.workers_per_host)
    worker_s = work.worker_cpu_s.at(servers)
    server_s = work.server_cpu_s.at(servers) / servers
    payload = layout.link_bits_per_s / 8 * _PAYLOAD
    sent, received = work.moved(servers)
    resources = {
        "worker": Resource(WORKER_CPU, worker_s, beside, layout.cores),
        "server": Resource(SERVER_CPU, server_s, every, min(_SERVER_CORES, layout.cores)),
        "up": Resource(LINK, sent / payload, beside),
        "down": Resource(LINK, received / payload, beside),
        "server up": Resource(LINK, sent / payload / servers, every),
        "server down": Resource(LINK, received / payload / servers, every),
    }
    if layout.total_cores is not None:
        all_s = worker_s + server_s * servers
        resources["shared"] = Resource(SHARED_CPU, all_s, every, layout.total_cores)

    def cpu(kind: str, name: str, seconds: float) -> Stage:
        return Stage(kind, {n: seconds for n in (name, "shared") if n in resources})

    def stages(lane: Lane) -> Iterator[Stage]:
        up, down = lane.sent.at(servers), lane.received.at(servers)
        share = (up + down) / max(1.0, sent + received)
        yield Stage(LINK, {"up": up / payload, "server up": up / payload / servers})
        yield cpu(SERVER_CPU, "server", server_s * share)
        yield Stage(LINK, {"down": down / payload, "server down": down / payload / servers})
        yield Stage(ROUND_TRIPS, {}, lane.round_trips * layout.round_trip_s)

    serial = [cpu(WORKER_CPU, "worker", worker_s), Stage(ROUND_TRIPS, {}, work.idle_s)]
    serial += [one for lane in work.lanes if not lane.overlaps for one in stages(lane)]
    paths = [serial, [one for lane in work.lanes if lane.overlaps for one in stages(lane)]]
    if work.mode == "sync":
        # the slowest of N normally distributed times is so much later than their mean
        late_s = work.spread * worker_s * math.sqrt(2 * math.log(every))
        step_s, limit = together([serial], resources, Stage(SLOWEST, {}, late_s))
    else:
        step_s, limit = paced(paths, resources)
    return step_s, limit, {name: min(1.0, one.full_s / step_s) for name, one in resources.items()}


# -- failures


def goodput(
    processes: int, needed: int, mtbf_s: float, restart_s: float, save_s: float
) -> tuple[float, float, float]:
    """The share of time whose work is kept: with checkpoints alone, their interval; with a log.

    Each process fails once in `mtbf_s`. With checkpoints every failure restarts all processes; a
    stretch of work and its save must pass without one (J. T. Daly, 2006). With a log a process
    resumes alone, and `needed` ones hold up the others meanwhile.
    """
    between_s = mtbf_s / processes

    def kept(every_s: float) -> float:
        exponent = min(500.0, (every_s + save_s) / between_s)
        lost = math.exp(min(500.0, restart_s / between_s)) * math.expm1(exponent)
        return every_s / (between_s * lost)

    guess = math.sqrt(2 * save_s * between_s)
    every_s = max((guess * 1.05**step for step in range(-60, 61)), key=kept)
    away = restart_s / mtbf_s
    others_share = 1.0 if needed == processes else 1 / (1 + away)
    return kept(every_s), every_s, others_share / (1 + needed * away)


def plan(options: argparse.Namespace) -> list[str]:
    """What is predicted for jobs of all sizes asked for."""
    model, _, mode = options.plan.partition(":")
    work = EXAMPLE if model == "example" else probed(model, mode)
    rows, failures = [], []
    for servers in options.servers:
        for workers in options.workers:
            layout = Layout(workers, servers, options.cores, options.cores, 1e9 * options.link_gbit)
            step_s, limit, use = predict(work, layout)
            link = max(use["server up"], use["server down"])
            shares = [f"{one:.0%}" for one in (use["worker"], use["server"], link)]
            size = [str(workers), str(servers)]
            rows.append([*size, f"{workers * BATCH / step_s:,.0f}", limit, *shares])
            all_of, needed = workers + servers, workers * (work.mode == "sync") + servers
            of = [86_400 * options.mtbf_days, options.restart_s, options.save_s]
            checkpoints, every_s, log = goodput(all_of, needed, *of)
            failures.append([*size, f"{checkpoints:.1%}", f"{every_s:.0f} s", f"{log:.1%}"])
    head = ("workers", "servers", "examples/s", "limit", "worker CPU", "server CPU", "server link")
    kept = ("workers", "servers", "kept with checkpoints", "every", "with a log")
    return [report.table(head, rows), report.table(kept, failures)]


# -- measuring

#: (workers, servers)
LAYOUTS = ((1, 1), (2, 1), (4, 1), (16, 1), (4, 2), (8, 4))
JOBS = ("wide_deep:sync", "wide_deep:async", "word2vec:async")
RATES = {"1 Gbit/s": 1e9, "200 Mbit/s": 2e8}
#: hosts of workers, where there are as many workers
WORKER_HOSTS = 2
PROBED = 2


def probed(model: str, mode: str, steps: int = 150) -> Work:
    """What a step costs, by a run with one server and one with two, through TCP."""
    found = []
    for servers in (1, PROBED):
        flags = ["--lanes", "--no_shared_memory"]
        one = Ours("probe", model, mode, steps, servers, 1, flags, warmup=50)
        [result] = jobs.run(one.job()).results
        found.append(result)
    few, many = found

    def line(a: float, b: float) -> Line:
        # a cost never falls with more servers, except by noise
        rise = min(max(0.0, (b - a) / (PROBED - 1)), a) / steps
        return Line(a / steps - rise, rise)

    lanes = []
    for name, (sent, received) in few["lanes"].items():
        if name in ("pull", "push", "prefetch"):
            more_sent, more_received = many["lanes"][name]
            overlaps = name == "prefetch" or (name == "push" and mode != "sync")
            trips = 2 if (name, model) == ("pull", "word2vec") else 1
            moves = line(sent, more_sent), line(received, more_received)
            lanes.append(Lane(*moves, overlaps, trips if sent else 0))
    own, served = (line(few[n], many[n]) for n in ("cpu_seconds", "server_cpu_seconds"))
    work = Work(mode, own, served, lanes)
    # without the time in which other programs had the cores
    idle_s = (few["seconds"] - few["ready_s"]) / steps - predict(work, Layout(1, 1))[0]
    print(work, flush=True)
    return dataclasses.replace(work, idle_s=max(0.0, idle_s))


def layout_of(workers: int, servers: int, bits: float) -> Layout:
    """The layout that `job` makes."""
    beside, cores = -(-workers // min(workers, WORKER_HOSTS)), machine.cores()
    return Layout(workers, servers, beside, cores, bits, total_cores=cores)


def job(name: str, of: tuple[str, str], step_s: float, one: Layout, rig: Rig) -> jobs.Job:
    """Each server on a host of its own, the workers on the others; some seconds of steps."""
    steps = max(10, min(400, round(3.0 / step_s)))
    ours = Ours(name, *of, steps, one.servers, one.workers, warmup=15).job()
    at = [*range(one.servers), *(one.servers + n % WORKER_HOSTS for n in range(one.workers))]
    ports = [jobs.free_port() for _ in range(one.servers + 1)]
    endpoints = [f"{rig.addresses[n]}:{port}" for n, port in enumerate(ports[1:])]
    shared = {
        "FLEET_SERVER_ENDPOINTS": ",".join(endpoints),
        "FLEET_MASTER": f"{rig.addresses[0]}:{ports[0]}",
    }
    commands = [
        jobs.Command([*rig.hosts[host].prefix, *c.argv], {**c.environment, **shared})
        for host, c in zip(at, ours.commands, strict=True)
    ]
    return dataclasses.replace(ours, commands=commands)


def measured(of: tuple[str, str], options: argparse.Namespace) -> tuple[str, list[float]]:
    """The section of a model in a mode, and the errors of its layouts."""
    work, rows, errors = probed(*of), [], []
    layouts = [pair for pair in LAYOUTS if pair[0] <= options.most]
    for title, bits in RATES.items():
        found = {f"{w} workers, {s} servers": layout_of(w, s, bits) for w, s in layouts}
        with hosts(max(s for _, s in LAYOUTS) + WORKER_HOSTS, rate=f"{bits / 1e6:.0f}mbit") as rig:
            make = {
                name: functools.partial(job, name, of, predict(work, one)[0], one, rig)
                for name, one in found.items()
            }
            runs = interleave.run_jobs(make, options.rounds, options.idle_s)
        for name, one in found.items():
            ratios = []
            for run in runs[name]:
                # the cores that other programs left
                cores = machine.cores() * (1 - min(0.95, run.foreign or 0.0))
                step_s, limit, _ = predict(work, dataclasses.replace(one, total_cores=cores))
                predicted = one.workers * BATCH / step_s
                ratios.append(predicted / rate(run))
            errors.append(statistics.median(ratios) - 1)
            reached = report.Spread.of(map(rate, runs[name]))
            rows.append(
                (title, name, f"{predicted:,.0f}", str(reached), f"{errors[-1]:+.0%}", limit)
            )
    head = ("links", "layout", "predicted examples/s", "measured", "error", "limit")
    return f"## {TITLES[of[0]]}: {of[1]}\n\n{report.table(head, rows)}", errors


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, or compare predictions with real jobs."""
    parser = interleave.parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--jobs", nargs="+", choices=JOBS, default=JOBS, help="check only these")
    add("--most", type=int, default=16, help="workers of the largest layout")
    add("--plan", choices=("example", *JOBS), help="only predict")
    add("--workers", type=int, nargs="+", default=[16, 64, 200, 1000])
    add("--servers", type=int, nargs="+", default=[4, 16, 64])
    add("--cores", type=int, default=16, help="of a host, and its workers")
    add("--link_gbit", type=float, default=10.0, help="of each host's link")
    add("--mtbf_days", type=float, default=10.0, help="a process fails once in so many days")
    add("--restart_s", type=float, default=120.0, help="until a failed one is at work again")
    add("--save_s", type=float, default=1.0, help="how long a checkpoint holds up the training")
    options = parser.parse_args(argv)
    if options.plan:
        return report.page("scaling", CLAIM, plan(options), quick=True)
    if options.quick:
        options.jobs, options.most, options.rounds = ["wide_deep:async"], 1, 1

    def sections() -> Iterator[str]:
        errors: list[float] = []
        for name in options.jobs:
            model, mode = name.split(":")
            text, found = measured((model, mode), options)
            errors += found
            yield text
        sizes = [abs(error) for error in errors]
        median = statistics.median(sizes)
        within = sum(size <= AT_MOST for size in sizes)
        yield (
            f"Median error {median:.1%}, at most {report.at_most(median, AT_MOST)}. {within} of "
            f"{len(sizes)} layouts are within {AT_MOST:.0%}; the worst is off by {max(sizes):.0%}."
        )

    return report.page("scaling", CLAIM, sections(), options.quick)


if __name__ == "__main__":
    sys.exit(main())
