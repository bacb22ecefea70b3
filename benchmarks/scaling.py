# SPDX-License-Identifier: Apache-2.0
"""The predictions of `fleetlight plan` beside real jobs, on hosts made of network namespaces.

A probe of each model and mode comes first. Then jobs of all layouts run on hosts whose links are
shaped. The hosts share the cores of this machine, which the prediction is told. Requires root, `ip`
and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rig.hosts import Rig, hosts

from benchmarks import harness, jobs, machine, report
from benchmarks.peers.ps_timed import BATCH
from benchmarks.ps_jobs import Ours
from benchmarks.ps_models import TITLES
from fleetlight.launch.capacity import probe
from fleetlight.launch.capacity.prediction import Layout, Prediction, predict
from fleetlight.launch.capacity.profile import Workload

AT_MOST = 0.15
CLAIM = (
    "`fleetlight plan` predicts the examples per second of a job with parameter servers from two "
    "short probes: with 1 to 16 workers and 1 to 4 servers, on links of 1 Gbit/s and 200 Mbit/s, "
    f"the median error is at most {AT_MOST:.0%}. All hosts share the cores of one machine."
)
#: (workers, servers)
LAYOUTS = ((1, 1), (2, 1), (4, 1), (16, 1), (4, 2), (8, 4))
MODES = (("wide_deep", "sync"), ("wide_deep", "async"), ("word2vec", "async"))
RATES = {"1 Gbit/s": 1e9, "200 Mbit/s": 2e8}
#: hosts of workers, where there are as many workers
WORKER_HOSTS = 2
#: about how long the timed part of a run takes, and its fewest and most steps
TIMED_S, FEWEST, MOST = 3.0, 10, 400
WARMUP = 15
PROBE = str(Path(__file__).parent / "ps_train.py")
PROBE_S = 120.0


@dataclasses.dataclass(frozen=True)
class Point:
    """One layout: what is predicted, and what each run reached."""

    model: str
    mode: str
    rate: str
    work: Workload
    layout: Layout
    runs: Sequence[jobs.Run]

    @property
    def predicted(self) -> Prediction:
        """The prediction for the median of the cores that other programs left."""
        return self._with(statistics.median(map(_left, self.runs)))

    @property
    def measured(self) -> report.Spread:
        """Examples per second of all workers together."""
        return report.Spread.of(map(_rate, self.runs))

    @property
    def error(self) -> float:
        """By how much the predictions exceed what their runs reached, as a share: the median."""
        ratios = [self._with(_left(run)).steps_per_s * BATCH / _rate(run) for run in self.runs]
        return statistics.median(ratios) - 1

    @property
    def cpu_ms(self) -> tuple[float, float]:
        """CPU milliseconds of a step of one worker, its part of the servers' included.

        As predicted, and the median of the runs.
        """
        costs = self.work.worker_cpu_s, self.work.server_cpu_s
        predicted = sum(cost.at(self.layout.servers) for cost in costs)
        return 1e3 * predicted, 1e3 * statistics.median(map(_cpu_s, self.runs))

    @property
    def memory_mib(self) -> tuple[float, float]:
        """MiB of a server: as predicted, and the peak of the largest in the runs."""
        peak = max(r["server_mib"] for run in self.runs for r in run.results)
        return self.predicted.server_bytes / 2**20, peak

    def _with(self, cores: float) -> Prediction:
        return predict(self.work, dataclasses.replace(self.layout, total_cores=cores))


def _rate(run: jobs.Run) -> float:
    return float(sum(r["examples"] / r["seconds"] for r in run.results))


def _cpu_s(run: jobs.Run) -> float:
    # each worker saw all that the servers used in its own time
    served = max(r["server_cpu_seconds"] for r in run.results)
    return float((served + sum(r["cpu_seconds"] for r in run.results)) / _steps(run))


def _steps(run: jobs.Run) -> int:
    return sum(r["steps"] for r in run.results)


def _left(run: jobs.Run) -> float:
    """The cores that other programs left to a run."""
    return machine.cores() * (1 - min(0.95, run.foreign or 0.0))


def main(argv: Sequence[str] | None = None) -> int:
    """Probe, run all layouts, write the result page."""
    options = _parse(argv)
    _set_environment()
    points: list[Point] = []
    for model, mode in MODES:
        if f"{model}:{mode}" not in options.jobs:
            continue
        work = probed(model, mode)
        for rate, bits in RATES.items():
            points += measured(model, mode, work, rate, bits, options)
            parts = page(points)
            if options.write:
                # a long run that is stopped leaves a page of what it has measured
                path = report.write("scaling", CLAIM, parts)
                print(f"written: {path.relative_to(jobs.ROOT)}", flush=True)
    print("\n\n".join(parts))
    return 0


def page(points: Sequence[Point]) -> list[str]:
    """The sections of the page: all errors, the table of each workload, the load."""
    tables = [section(points, model, mode) for model, mode in MODES]
    foreign = report.foreign_line([run.foreign for point in points for run in point.runs])
    return [summary(points), *filter(None, tables), foreign]


def _set_environment() -> None:
    """What the processes of a probe get: the same as those of a job."""
    os.environ.update(jobs.environment({}))


def probed(model: str, mode: str) -> Workload:
    """What a step costs, by the probe of the command."""
    command = [PROBE, "--system", "fleetlight", "--model", model, "--mode", mode]
    # it never reaches the timed part
    command += ["--steps", "1", "--warmup", "1000000"]
    with _inside_empty_folder():
        work = probe.measure(command, PROBE_S, lambda text: print(text, flush=True)).workload
    print(work, flush=True)
    return work


@contextlib.contextmanager
def _inside_empty_folder() -> Iterator[None]:
    """The servers leave their process ids in the folder of the job."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def measured(
    model: str, mode: str, work: Workload, rate: str, bits: float, options: argparse.Namespace
) -> Iterator[Point]:
    """Run every layout with links of one speed."""
    layouts = {
        f"{model} {mode} {rate} {workers}+{servers}": layout(workers, servers, bits)
        for workers, servers in LAYOUTS
        if workers <= options.most
    }
    with hosts(max(s for _, s in LAYOUTS) + WORKER_HOSTS, rate=f"{bits / 1e6:.0f}mbit") as rig:
        make = {
            name: functools.partial(job, name, model, mode, predict(work, one), rig)
            for name, one in layouts.items()
        }
        runs = harness.rounds(make, options.rounds, options.idle_s, attempts=2)
    for name, one in layouts.items():
        point = Point(model, mode, rate, work, one, runs[name])
        told = f"CPU ms {_pair(point.cpu_ms)}, MiB {_pair(point.memory_mib)}"
        print(f"{name}: {point.error:+.0%}, {told}", flush=True)
        yield point


def layout(workers: int, servers: int, bits: float) -> Layout:
    """The layout that `job` makes."""
    beside = -(-workers // min(workers, WORKER_HOSTS))
    cores = machine.cores()
    return Layout(
        workers=workers,
        servers=servers,
        workers_per_host=beside,
        cores=cores,
        link_bits_per_s=bits,
        total_cores=cores,
    )


def job(name: str, model: str, mode: str, one: Prediction, rig: Rig) -> jobs.Job:
    """Each server on a host of its own, the workers on the others."""
    workers, servers = one.layout.workers, one.layout.servers
    steps = max(FEWEST, min(MOST, round(TIMED_S / one.step_s)))
    ours = Ours(name, model, mode, steps, servers, workers, warmup=WARMUP).job()
    at = [*range(servers), *(servers + n % WORKER_HOSTS for n in range(workers))]
    ports = [jobs.free_port() for _ in range(servers + 1)]
    shared = {
        "FLEET_SERVER_ENDPOINTS": ",".join(
            f"{rig.addresses[n]}:{port}" for n, port in enumerate(ports[1:])
        ),
        "FLEET_MASTER": f"{rig.addresses[0]}:{ports[0]}",
    }
    commands = [
        jobs.Command([*rig.hosts[host].prefix, *c.argv], {**c.environment, **shared})
        for host, c in zip(at, ours.commands, strict=True)
    ]
    return dataclasses.replace(ours, commands=commands)


def summary(points: Sequence[Point]) -> str:
    """The errors of all layouts."""
    errors = sorted(abs(point.error) for point in points)
    worst = max(points, key=lambda point: abs(point.error))
    median = statistics.median(errors)
    within = sum(error <= AT_MOST for error in errors)
    verdict = "met" if median <= AT_MOST else "missed"
    who = worst.layout
    return (
        f"Median error {median:.1%}, at most {AT_MOST:.0%}: {verdict}. {within} of {len(errors)} "
        f"layouts are within {AT_MOST:.0%}. The worst: {worst.error:+.0%}, {worst.model} "
        f"{worst.mode}, {who.workers} workers, {who.servers} servers, {worst.rate}."
    )


def section(points: Sequence[Point], model: str, mode: str) -> str:
    """One workload's table; empty if it did not run."""
    mine = [point for point in points if (point.model, point.mode) == (model, mode)]
    if not mine:
        return ""
    rows = [
        (
            point.rate,
            str(point.layout.workers),
            str(point.layout.servers),
            _pair(point.cpu_ms),
            _pair(point.memory_mib),
            report.short(point.predicted.layout.total_cores or 0.0),
            report.short(point.predicted.steps_per_s * BATCH),
            str(point.measured),
            f"{point.error:+.0%}",
            point.predicted.limit,
        )
        for point in mine
    ]
    head = (
        *("links", "workers", "servers", "CPU ms of a step", "MiB of a server"),
        *("cores left", "predicted examples/s"),
        *("measured: median (min..max)", "error", "limit"),
    )
    return f"## {TITLES[model]}: {mode}\n\n{report.table(head, rows)}"


def _pair(of: tuple[float, float]) -> str:
    """Predicted and measured."""
    return " / ".join(map(report.short, of))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    every = [f"{model}:{mode}" for model, mode in MODES]
    parser.add_argument("--jobs", nargs="+", choices=every, default=every, help="only these")
    parser.add_argument("--most", type=int, default=16, help="workers of the largest layout")
    parser.add_argument("--idle_s", type=float, default=0.0, help="wait for an idle machine first")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
