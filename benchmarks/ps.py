# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: the models that are timed, their jobs, and the summary of results.

As a program it is one process of such a job: plain torch, or a worker or server of Fleetlight. Its
role comes from the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from benchmarks import interleave, jobs, report
from benchmarks.jobs import ROOT, Command, Job, Run
from benchmarks.peers import ps_timed
from benchmarks.peers.ps_timed import DIM, NUMBERS, ROWS, SLOTS, WIDTH

Batch = tuple[Tensor, ...]
Make = Callable[[], Job]
MODES = ("sync", "async", "geo")
#: steps that take some seconds, so that the rest of a queue at the end has little weight
STEPS = {"wide_deep": 400, "word2vec": 3000}
# an exchange of GeoSGD, every 100 steps, is among them
WARMUP = 120
#: more than anybody waits for: jobs that take turns are ended after the last one
ENDLESS = 10_000_000
PROGRAM = [sys.executable, "-m", "benchmarks.ps"]


# -- models


class Bags(nn.Module):
    """Plain torch's rows with sparse gradients: bags of one id each."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
        nn.init.uniform_(self.bag.weight, -0.05, 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """The row of each id."""
        found: Tensor = self.bag(ids.view(-1, 1))
        return found.view(*ids.shape, -1)


#: makes a layer of that many rows of that width
MakeRows = Callable[[int, int], nn.Module]


class WideDeep(nn.Module):
    """Log-odds of a click: an MLP over vectors and numbers, and a line through the numbers."""

    def __init__(self, rows: MakeRows) -> None:
        super().__init__()
        self.rows = rows(ROWS["wide_deep"], DIM["wide_deep"])
        self.mlp = nn.Sequential(
            *(nn.Linear(SLOTS * DIM["wide_deep"] + NUMBERS, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, 1),
        )
        self.wide = nn.Linear(NUMBERS, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Log-odds of each record."""
        deep: Tensor = self.mlp(torch.cat([self.rows(ids).flatten(1), numbers], dim=1))
        wide: Tensor = self.wide(numbers)
        return deep + wide


class Word2Vec(nn.Module):
    """Log-odds that a word stands near another: the product of their vectors."""

    def __init__(self, rows: MakeRows) -> None:
        super().__init__()
        self.centers = rows(ROWS["word2vec"], DIM["word2vec"])
        self.targets = rows(ROWS["word2vec"], DIM["word2vec"])

    def forward(self, centers: Tensor, targets: Tensor) -> Tensor:
        """Log-odds of each target of each center."""
        # not a batched matrix product, whose backward takes three times as long on a CPU
        products: Tensor = self.targets(targets) * self.centers(centers)
        return products.sum(2)


MODELS: dict[str, Callable[[MakeRows], nn.Module]] = {"wide_deep": WideDeep, "word2vec": Word2Vec}
TITLES = {
    "wide_deep": "Wide & deep: 26 slots of one table of 1,000,001 x 9, 13 numbers, 3 x 400, SGD, "
    "batch 512",
    "word2vec": "Word2vec: 2 tables of 100,000 x 64, 5 negatives, SGD, batch 512",
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.SGD(model.parameters(), lr=ps_timed.LR)


def batches_of(model: str, rank: int, count: int = 0) -> list[Batch]:
    """A worker's batches: inputs, then labels."""
    return [tuple(map(torch.from_numpy, batch)) for batch in ps_timed.batches(model, rank, count)]


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., float]:
    """A step on a batch, which returns the loss."""

    def step(*batch: Tensor) -> float:
        loss = binary_cross_entropy_with_logits(model(*batch[:-1]), batch[-1])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


# -- jobs


@dataclasses.dataclass(frozen=True)
class Ours:
    """A job of Fleetlight: the numbers of servers and workers, and where they run."""

    name: str
    model: str
    mode: str
    steps: int
    servers: int = 1
    workers: int = 2
    #: further flags of this program
    flags: Sequence[str] = ()
    #: untimed steps
    warmup: int = WARMUP
    #: what starts a command of a server, or of a worker, elsewhere
    around: tuple[Sequence[str], Sequence[str]] = ((), ())
    #: where the servers listen
    host: str = "127.0.0.1"
    #: each process stays on a core of its own, servers first
    own_core: bool = False
    #: the folder `src` of another checkout, whose fleetlight is used in place of this one's
    source: str = ""

    def job(self) -> Job:
        """A new job for every run, since ports differ."""
        argv = [*PROGRAM, *told(self.model, self.steps, self.warmup), "--mode", self.mode]
        argv += self.flags
        path = {"PYTHONPATH": os.pathsep.join([self.source, str(ROOT)])} if self.source else {}
        commands = []
        for core, one in enumerate(jobs.fleet(argv, self.servers, self.workers, self.host)):
            around = self.around[core >= self.servers]
            own = ["--core", str(core)] if self.own_core else []
            commands.append(Command([*around, *argv, *own], {**one.environment, **path}))
        return Job(self.name, commands, results=self.workers)


def one_process(name: str, system: str, model: str, steps: int) -> Make:
    """One process on one core: plain torch, or Fleetlight with the server in the same process."""
    argv = [*PROGRAM, "--system", system, "--core", "0", *told(model, steps)]
    return lambda: Job(name, [Command(argv)], results=1)


def told(model: str, steps: int, warmup: int = WARMUP) -> list[str]:
    """What every program is told."""
    return ["--model", model, "--steps", str(steps), "--warmup", str(min(warmup, steps))]


# -- summaries


@dataclasses.dataclass(frozen=True)
class Measured:
    """The rounds of one variant, as series to compare."""

    #: examples per second of all workers together, and per CPU second of workers and servers
    speed: report.Series
    thrift: report.Series
    #: the most MiB of a server, and of a worker
    memory: report.Series
    worker_mib: float

    @classmethod
    def of(cls, name: str, runs: Sequence[Run]) -> Measured:
        """What the results of the runs come to."""
        servers = [max(r["server_mib"] for r in run.results) for run in runs]
        return cls(
            report.Series(name, [rate(run) for run in runs]),
            report.Series(name, [_per_cpu_s(run) for run in runs]),
            report.Series(name, servers),
            max(r["worker_mib"] for run in runs for r in run.results),
        )

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        rates = [str(report.Spread.of(one.rates)) for one in (self.speed, self.thrift)]
        peak = max(self.memory.rates)
        return self.speed.name, *rates, f"{peak:.0f}" if peak else "-", f"{self.worker_mib:.0f}"


def rate(run: Run) -> float:
    """Examples per second of all workers together."""
    return float(sum(r["examples"] / r["seconds"] for r in run.results))


def _per_cpu_s(run: Run) -> float:
    """Each worker saw all that the servers used in its own time; the times are nearly the same."""
    served = max(r["server_cpu_seconds"] for r in run.results)
    spent = served + sum(r["cpu_seconds"] for r in run.results)
    # a short run may use less than the kernel's clock can tell
    return float(sum(r["examples"] for r in run.results) / max(spent, 1e-3))


@dataclasses.dataclass(frozen=True)
class Bar:
    """What one variant must reach beside another: in `speed`, in `thrift` or in `memory`."""

    over: str
    under: str
    at_least: float | None
    of: str = "speed"


_UNITS = {"speed": "", "thrift": ", examples per CPU second", "memory": ", server's memory"}


def section(title: str, runs: interleave.Runs, bars: Sequence[Bar]) -> str:
    """One workload's tables; bars of variants that were left out are too."""
    found = {name: Measured.of(name, of) for name, of in runs.items()}
    head = ("variant", "examples/s: median (min..max)", "examples per CPU second")
    compared = []
    for bar in bars:
        if bar.over in found and bar.under in found:
            over, under = (getattr(found[name], bar.of) for name in (bar.over, bar.under))
            compared.append(report.Ratio(over, under, bar.at_least).row(_UNITS[bar.of]))
    rows = [one.row() for one in found.values()]
    parts = [
        f"## {title}",
        report.table((*head, "server, peak MiB", "worker, peak MiB"), rows),
        report.ratio_table("ratio", compared),
        f"Rounds: {len(next(iter(runs.values())))}. "
        f"{report.foreign_line(interleave.job_foreign(runs))}",
    ]
    return "\n\n".join(parts)


def compare(
    name: str,
    claim: str,
    parser: argparse.ArgumentParser,
    variants: Callable[[str, int, argparse.Namespace], Mapping[str, Make]],
    bars: Callable[[str], Sequence[Bar]],
    argv: Sequence[str] | None,
) -> int:
    """A benchmark that runs fresh jobs of each model, `variants(model, steps, options)`."""
    parser.add_argument("--models", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--steps", type=int, help="timed steps of each worker")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these variants only")
    options = parser.parse_args(argv)

    def measured(model: str) -> str:
        steps = 20 if options.quick else options.steps or STEPS[model]
        make = variants(model, steps, options)
        if unknown := set(options.only or ()) - set(make):
            parser.error(f"--only: got {sorted(unknown)}, expected some of {list(make)}")
        make = {one: of for one, of in make.items() if one in (options.only or make)}
        if not options.quick:
            # kernels are compiled once, and then come from files
            for one in variants(model, WARMUP, options).values():
                jobs.run(one())
        runs = interleave.run_jobs(make, 1 if options.quick else options.rounds, options.idle_s)
        return section(TITLES[model], runs, bars(model))

    return report.page(name, claim, map(measured, options.models), options.quick)


# -- the program


def main() -> None:
    """Train, report, leave."""
    options = _parse()
    os.environ.setdefault("FLEET_DEADLINE_S", "120")
    if options.core is not None:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[options.core]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.system == "torch":
        model = MODELS[options.model](Bags)
        step = stepper(model, sgd(model))
        train(options, step, batches_of(options.model, 0))
    else:
        fleetlight(options)


def fleetlight(options: argparse.Namespace) -> None:
    """Fleetlight, eager or by a static program: a server serves, a worker trains."""
    import fleetlight as fleet

    configs: dict[str, Any] = {"k_steps": options.k_steps} if options.mode == "geo" else {}
    if options.staleness is not None:
        configs["staleness"] = options.staleness
    strategy = fleet.DistributedStrategy(
        a_sync=options.mode != "sync",
        a_sync_configs=configs,  # type: ignore[arg-type]
        durability=options.durability,
        ssl=options.ssl,
        shared_memory=options.shared_memory,
    )
    fleet.init(strategy=strategy)
    plain = MODELS[options.model](lambda rows, dim: fleet.nn.SparseEmbedding(dim))
    optimizer = fleet.distributed_optimizer(sgd(plain))
    program = Program(plain, optimizer, options.model) if options.system == "static" else None
    step = program.step if program else stepper(fleet.distributed_model(plain), optimizer)
    if fleet.is_server():
        ps_timed.announce_server()
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    batches: Iterable[Batch] = batches_of(options.model, fleet.worker_index())
    if options.lookahead:
        batches = fleet.shard(DataLoader(batches, batch_size=1, collate_fn=_first))  # type: ignore[arg-type]
    several = program.steps if program and options.steps_per_call > 1 else None
    train(options, step, batches, several)
    fleet.stop_worker()


def train(
    options: argparse.Namespace,
    step: Callable[..., float],
    batches: Iterable[Batch],
    several: Callable[[Iterator[Batch], int], float] | None = None,
) -> None:
    """Warm up, time the steps and what is left behind them, report."""
    is_ours = options.system != "torch"
    if is_ours:
        import fleetlight as fleet
    rank = fleet.worker_index() if is_ours else 0
    endless = _endless(batches)
    counter = interleave.Counter(Path(), rank) if options.count else None

    def drive(steps: int) -> float:
        for _ in range(0, steps, options.steps_per_call):
            loss = several(endless, options.steps_per_call) if several else step(*next(endless))
            if counter:
                counter.add()
        return float(loss)

    drive(options.warmup)
    if is_ours:
        # all begin together; a barrier at the end leaves nothing in a queue
        fleet.all_reduce(1)
    before, ready_s = _moved(options), _ready_s()
    with ps_timed.Window() as window:
        loss = drive(options.steps)
        if is_ours:
            fleet.barrier_worker()
    lanes = {
        name: [b - a for a, b in zip(before[name], of, strict=True)]
        for name, of in _moved(options).items()
    }
    system = f"{options.system}, torch {torch.__version__}"
    window.report(
        options, rank, loss=loss, system=system, lanes=lanes, ready_s=_ready_s() - ready_s
    )


def _ready_s() -> float:
    """How long the main thread was ready and had no core."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def _moved(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """By lane: the bytes that this worker has sent and received."""
    if not options.lanes:
        return {}
    from fleetlight.fleet.job import current
    from fleetlight.fleet.served.job import ServedJob

    job = current()
    assert isinstance(job, ServedJob)
    return job.session.client.bytes_moved()


class Program:
    """The same as a program; servers write it too, which tells them what is trained."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
        from fleetlight import static

        self._names = [*inspect.signature(model.forward).parameters, "labels"]
        inputs = dict(zip(self._names, batches_of(name, 0, count=1)[0], strict=True))
        loss = binary_cross_entropy_with_logits
        self._program = static.capture(model, loss, optimizer, inputs)
        self._executor = static.Executor()
        self._bind = static.bind

    def step(self, *batch: Tensor) -> float:
        """One step a call."""
        feed = dict(zip(self._names, batch, strict=True))
        [loss] = self._executor.run(self._program, feed, ["loss"])
        return loss.item()  # type: ignore[no-any-return]

    def steps(self, batches: Iterator[Batch], count: int) -> float:
        """Several steps a call, of the started loader."""
        if self._program.loader is None:
            self._bind(batches, self._names, self._program).start()
        [loss] = self._executor.run(self._program, fetch_list=["loss"], steps=count)
        return loss.item()  # type: ignore[no-any-return]


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _first(batches: list[Batch]) -> Batch:
    return batches[0]


def _parse() -> argparse.Namespace:
    parser = ps_timed.parser()
    add = parser.add_argument
    add("--system", choices=("torch", "fleetlight", "static"), default="fleetlight")
    add("--staleness", type=int, help="a bound for async")
    add("--lookahead", action="store_true", help="pull the next batch's rows ahead")
    add("--durability", choices=("none", "snapshot", "log"), default="none")
    add("--ssl", default="", help="folder of certificates")
    add("--no_shared_memory", dest="shared_memory", action="store_false")
    add("--core", type=int, help="stay on this one of the cores, counted from 0")
    add("--steps_per_call", type=int, default=1, help="a divisor of the others")
    add("--count", action="store_true", help="for jobs that take turns")
    add("--lanes", action="store_true", help="report the bytes of each lane")
    return parser.parse_args()


if __name__ == "__main__":
    main()
