# SPDX-License-Identifier: Apache-2.0
"""Jobs with parameter servers, Fleetlight's and plain torch's, and the summary of their results."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks import report
from benchmarks.jobs import ROOT, Command, Job, Run, free_port

#: steps that take some seconds, so that the rest of a queue at the end has little weight
STEPS = {"wide_deep": 400, "word2vec": 3000}
# an exchange of GeoSGD, every 100 steps, is among them
WARMUP = 120
PROGRAM = [sys.executable, "-m", "benchmarks.ps_train"]
Make = Callable[[], Job]


@dataclasses.dataclass(frozen=True)
class Ours:
    """A job of Fleetlight: the numbers of servers and workers, and where they run."""

    name: str
    model: str
    mode: str
    steps: int
    servers: int = 1
    workers: int = 2
    k_steps: int = 100
    lookahead: bool = False
    #: each process stays on a core of its own, servers first
    own_core: bool = False
    #: untimed steps
    warmup: int = WARMUP
    #: what starts a command of a server, or of a worker, elsewhere
    around: tuple[Sequence[str], Sequence[str]] = ((), ())
    #: where the servers listen
    host: str = "127.0.0.1"
    #: "static": by a program
    system: str = "fleetlight"
    #: durability, and the time between snapshots
    durability: str = "none"
    snapshot_s: float = 300.0
    #: a folder of certificates; "": connections are not encrypted
    ssl: str = ""
    #: False: rows and gradients go through TCP, as between hosts
    shared_memory: bool = True
    #: how many steps an async worker may be ahead of the slowest
    staleness: int | None = None
    #: the form in which rows and gradients travel
    table_wire: str = "fp32"
    steps_per_call: int = 1
    #: workers tell how far they are, for jobs that take turns
    count: bool = False
    #: the folder `src` of another checkout, whose fleetlight is used in place of this one's
    source: str = ""

    def job(self) -> Job:
        """A new job for every run, since ports differ."""
        endpoints = [f"{self.host}:{free_port()}" for _ in range(self.servers)]
        common: dict[str, object] = {
            "FLEET_SERVER_NUM": self.servers,
            "FLEET_WORKER_NUM": self.workers,
            "FLEET_SERVER_ENDPOINTS": ",".join(endpoints),
            "FLEET_MASTER": f"{self.host}:{free_port()}",
            "FLEET_DEADLINE_S": 120,
            # workers write to this folder, too
            "FLEET_JOB": "benchmark",
        }
        if self.source:
            common["PYTHONPATH"] = os.pathsep.join([self.source, str(ROOT)])
        commands: list[Command] = []
        for kind, count in (("server", self.servers), ("worker", self.workers)):
            for index in range(count):
                own = {"FLEET_ROLE": kind, "FLEET_INDEX": index}
                environment = {key: str(value) for key, value in (common | own).items()}
                argv = [*self.around[kind == "worker"], *self._argv(len(commands))]
                commands.append(Command(argv, environment))
        return Job(self.name, commands, results=self.workers)

    def _argv(self, core: int) -> list[str]:
        argv = [*PROGRAM, "--system", self.system, *options(self.model, self.steps, self.warmup)]
        argv += ["--mode", self.mode, "--k_steps", str(self.k_steps)]
        argv += ["--durability", self.durability, "--snapshot_s", str(self.snapshot_s)]
        argv += ["--ssl", self.ssl] * bool(self.ssl)
        argv += ["--no_shared_memory"] * (not self.shared_memory)
        if self.staleness is not None:
            argv += ["--staleness", str(self.staleness)]
        if self.table_wire != "fp32":
            # another checkout may not know it
            argv += ["--table_wire", self.table_wire]
        argv += ["--steps_per_call", str(self.steps_per_call)] * (self.steps_per_call > 1)
        argv += ["--lookahead"] * self.lookahead + ["--count"] * self.count
        return argv + ["--core", str(core)] * self.own_core


def one_process(name: str, system: str, model: str, steps: int) -> Job:
    """One process on one core: plain torch, or Fleetlight with the server in the same process."""
    argv = [*PROGRAM, "--system", system, "--core", "0", *options(model, steps)]
    return Job(name, [Command(argv)], results=1)


def options(model: str, steps: int, warmup: int = WARMUP) -> list[str]:
    """What every program is told."""
    return ["--model", model, "--steps", str(steps), "--warmup", str(warmup)]


def add_usual_options(parser: argparse.ArgumentParser) -> None:
    """How a benchmark of such jobs is run, and whether it leaves a page."""
    parser.add_argument("--idle_s", type=float, default=0.0, help="wait for an idle machine first")
    parser.add_argument(
        "--prime", action=argparse.BooleanOptionalAction, default=True, help="one run unmeasured"
    )
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)


@dataclasses.dataclass(frozen=True)
class Figures:
    """The rounds of one variant."""

    name: str
    #: examples per second of all workers together
    rates: Sequence[float]
    #: examples per CPU second of workers and servers
    per_cpu_s: Sequence[float]
    server_mib: Sequence[float]
    worker_mib: Sequence[float]

    @classmethod
    def of(cls, name: str, runs: Sequence[Run]) -> Figures:
        """What the results of the runs come to."""
        return cls(
            name,
            [sum(r["examples"] / r["seconds"] for r in run.results) for run in runs],
            [_per_cpu_s(run) for run in runs],
            [max(r["server_mib"] for r in run.results) for run in runs],
            [max(r["worker_mib"] for r in run.results) for run in runs],
        )

    @property
    def speed(self) -> report.Series:
        """Examples per second, to be compared."""
        return report.Series(self.name, self.rates, ())

    @property
    def thrift(self) -> report.Series:
        """Examples per CPU second, to be compared."""
        return report.Series(self.name, self.per_cpu_s, ())

    @property
    def memory(self) -> report.Series:
        """The most memory of a server, to be compared."""
        return report.Series(self.name, self.server_mib, ())

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        spread = report.Spread.of
        servers = f"{spread(self.server_mib).median:.0f}" if any(self.server_mib) else "-"
        return (
            self.name,
            str(spread(self.rates)),
            str(spread(self.per_cpu_s)),
            servers,
            f"{spread(self.worker_mib).median:.0f}",
        )


def _per_cpu_s(run: Run) -> float:
    """Each worker saw all that the servers used in its own time; the times are nearly the same."""
    served = max(r["server_cpu_seconds"] for r in run.results)
    spent = served + sum(r["cpu_seconds"] for r in run.results)
    # a short run may use less than the kernel's clock can tell
    return float(sum(r["examples"] for r in run.results) / max(spent, 1e-3))


@dataclasses.dataclass(frozen=True)
class Bar:
    """What one variant must reach beside another: in `speed`, or in `thrift`."""

    over: str
    under: str
    at_least: float | None
    of: str = "speed"

    def ratio(self, figures: Mapping[str, Figures]) -> report.Ratio:
        """The ratio round by round."""
        over, under = (getattr(figures[name], self.of) for name in (self.over, self.under))
        return report.Ratio(over, under, self.at_least)


def section(
    title: str,
    runs: Mapping[str, Sequence[Run]],
    bars: Sequence[Bar],
    foreign: Sequence[float | None],
) -> str:
    """One workload's tables; bars of variants that were left out are too."""
    figures = {name: Figures.of(name, of) for name, of in runs.items()}
    head = ("variant", "examples/s: median (min..max)", "examples per CPU second")
    compared = [
        (_named(bar, ratio), str(ratio.spread), ratio.verdict, _listed(ratio.rounds))
        for bar in bars
        if bar.over in figures and bar.under in figures
        for ratio in [bar.ratio(figures)]
    ]
    parts = [
        f"## {title}",
        report.table(
            (*head, "server, peak MiB", "worker, peak MiB"), [f.row() for f in figures.values()]
        ),
        report.table(("ratio", "median (min..max)", "at least", "each round"), compared),
        f"Rounds: {len(next(iter(runs.values())))}. {report.foreign_line(foreign)}",
    ]
    return "\n\n".join(parts)


def _named(bar: Bar, ratio: report.Ratio) -> str:
    units = {"speed": "", "thrift": ", examples per CPU second", "memory": ", server's memory"}
    return f"{ratio.over.name} / {ratio.under.name}{units[bar.of]}"


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
