# SPDX-License-Identifier: Apache-2.0
"""Model quality with parameter servers: AUC against plain torch, and mode against mode.

Plain torch trains in one process on the blocks of records that the workers share, with the same
first values. `--data` is a folder with the files of Adult and MovieLens, at any depth.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import harness, jobs, report
from benchmarks.launch_overhead import launcher

CLAIM = (
    "Parameter servers cost no quality. A wide & deep model trained in sync by 1 server and 2 "
    "workers reaches the AUC of plain one-process torch on the same records within 0.002, on the "
    "Adult census and on MovieLens. On a generated click log, async and GeoSGD reach at least that "
    "of sync less 0.002, with the same settings and as many examples. Rows and gradients that "
    "travel as bf16, fp16 or int8 cost less than 0.002 in every mode."
)
PROGRAM = Path(__file__).parent / "quality_train.py"
WITHIN = 0.002
TORCH, SYNC = "plain torch", "sync"
#: epochs and learning rate; more than two, and MovieLens is learnt by heart
REAL = {"adult": (5, 0.05), "movielens": (2, 0.05)}
#: in every mode the best of those tried, from 0.01 to 0.1, on a shorter log of another seed
LR = 0.02
MODES: Mapping[str, Sequence[str]] = {
    SYNC: ("--mode", "sync"),
    "async": ("--mode", "async"),
    "geo, k=20": ("--mode", "geo", "--k_steps", "20"),
    "geo, k=100": ("--mode", "geo", "--k_steps", "100"),
}
#: the task of narrow rows, and the forms beside fp32
NARROW, FP32, WIRES = "narrow", "fp32", ("bf16", "fp16", "int8")
#: the task of workers that join and leave, and the program that starts and ends them
JOINS, ELASTIC = "elastic", Path(__file__).parent / "elastic_job.py"
#: what makes a job of a name and flags, and the flags that are the same with every seed
Variant = tuple[Callable[[str, Sequence[str]], jobs.Job], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The AUC of one variant beside another's, seed by seed."""

    name: str
    reached: Sequence[float]
    beside: Sequence[float]
    #: a higher one is no loss, unless both should be the same
    both_ways: bool = False

    @property
    def seeds(self) -> list[float]:
        """What it has more than the other, with each seed."""
        return [a - b for a, b in zip(self.reached, self.beside, strict=True)]

    @property
    def verdict(self) -> str:
        """Whether the median is close enough."""
        median = report.Spread.of(self.seeds).median
        kept = median >= -WITHIN and (median <= WITHIN or not self.both_ways)
        return f"{WITHIN}: {'met' if kept else 'missed'}"

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        each = " ".join(f"{one:+.4f}" for one in self.seeds)
        return self.name, spread(self.reached), spread(self.seeds, "+.4f"), self.verdict, each


def spread(values: Sequence[float], form: str = ".4f") -> str:
    """Median, lowest and highest, with as many digits as AUC needs."""
    of = report.Spread.of(values)
    return f"{of.median:{form}} ({of.low:{form}}..{of.high:{form}})"


def torch_job(name: str, flags: Sequence[str]) -> jobs.Job:
    """One process of plain torch."""
    argv = [sys.executable, str(PROGRAM), "--system", "torch", *flags]
    return jobs.Job(name, [jobs.Command(argv)], results=1)


def servers_job(name: str, flags: Sequence[str]) -> jobs.Job:
    """One server and two workers; the first worker tells the result."""
    argv = [*launcher(), "--server_num", "1", "--worker_num", "2", str(PROGRAM)]
    return jobs.Job(name, [jobs.Command([*argv, "--system", "fleetlight", *flags])], results=1)


def real(task: str, options: argparse.Namespace) -> str:
    """Sync beside plain torch, on records that people have left."""
    epochs, lr = REAL[task]
    common = ["--task", task, "--epochs", str(epochs), "--lr", str(lr), "--data"]
    common += [str(Path(options.data).absolute()) if options.data else ""]
    runs = _runs({TORCH: (torch_job, common), SYNC: (servers_job, common)}, options)
    one = runs[TORCH][0].results[0]
    title = (
        f"{one['records']}: {one['examples'] // epochs:,} records, {one['tested']:,} others to "
        f"test on, {one['rows']:,} ids; {epochs} epochs, Adagrad, learning rate {lr}"
    )
    rows = [Difference(SYNC, _aucs(runs[SYNC]), _aucs(runs[TORCH]), both_ways=True).row()]
    return _section(title, TORCH, _aucs(runs[TORCH]), rows, runs)


def modes(options: argparse.Namespace) -> str:
    """Async and GeoSGD beside sync, on generated clicks."""
    common = ["--task", "clicks", "--samples", str(options.samples), "--lr", str(LR)]
    make = {name: (servers_job, [*common, *flags]) for name, flags in MODES.items()}
    runs = _runs(make, options)
    best = spread([run.results[0]["best_auc"] for run in runs[SYNC]])
    title = (
        f"Generated click log: {options.samples:,} records, 26 fields of up to 20,000 ids; one "
        f"epoch, Adagrad, learning rate {LR} in every mode; best possible AUC {best}"
    )
    others = [name for name in MODES if name != SYNC]
    rows = [Difference(name, _aucs(runs[name]), _aucs(runs[SYNC])).row() for name in others]
    return _section(title, SYNC, _aucs(runs[SYNC]), rows, runs)


def narrow(options: argparse.Namespace) -> str:
    """Each mode with narrow rows beside itself with float32, on MovieLens and generated clicks."""
    epochs, lr = REAL["movielens"]
    data = str(Path(options.data).absolute()) if options.data else ""
    logs = {
        "movielens": ("--epochs", str(epochs), "--lr", str(lr), "--data", data),
        "clicks": ("--samples", str(options.samples), "--lr", str(LR)),
    }
    make = {
        f"{task}, {mode}, {wire}": (
            servers_job,
            ("--task", task, *rest, *MODES[mode], "--table_wire", wire),
        )
        for task, rest in logs.items()
        for mode in (SYNC, "async", "geo, k=20")
        for wire in (FP32, *WIRES)
    }
    found = {name: _aucs(runs) for name, runs in _runs(make, options).items()}
    head = ("variant", "AUC: median (min..max)", "more than fp32", "within", "each seed")
    rows = [
        Difference(name, reached, found[f"{name.rpartition(', ')[0]}, {FP32}"]).row()
        for name, reached in found.items()
    ]
    return f"## Narrow rows\n\n{report.table(head, rows)}\n\nSeeds: {options.seeds}."


def elastic_job(name: str, flags: Sequence[str]) -> jobs.Job:
    """One server, and two workers that become four and then one."""
    argv = [sys.executable, str(ELASTIC), "--system", "fleetlight", "--deal", "queue", *flags]
    return jobs.Job(name, [jobs.Command(argv)], results=1)


def elastic(options: argparse.Namespace) -> str:
    """Each mode with workers that join and leave beside itself with two, on Adult."""
    epochs, lr = REAL["adult"]
    data = str(Path(options.data).absolute()) if options.data else ""
    common = ("--task", "adult", "--epochs", str(epochs), "--lr", str(lr), "--data", data)
    make: dict[str, Variant] = {}
    for mode in (SYNC, "async", "geo, k=20"):
        make[mode] = servers_job, (*common, *MODES[mode])
        make[f"{mode}, elastic"] = elastic_job, (*common, *MODES[mode])
    runs = _runs(make, options)
    found = {name: _aucs(of) for name, of in runs.items()}
    head = ("variant", "AUC: median (min..max)", "more than two workers", "within", "each seed")
    rows = [
        Difference(name, reached, found[name.removesuffix(", elastic")]).row()
        for name, reached in found.items()
    ]
    title = f"Workers that join and leave: Adult, {epochs} epochs, Adagrad, learning rate {lr}"
    text = report.table(head, rows)
    return f"## {title}\n\n{text}\n\nSeeds: {options.seeds}. " + report.foreign_line(
        harness.foreign(runs)
    )


def _runs(make: Mapping[str, Variant], options: argparse.Namespace) -> dict[str, list[jobs.Run]]:
    """Every variant with every seed: a round is a seed."""
    runs: dict[str, list[jobs.Run]] = {name: [] for name in make}
    for seed in range(options.seeds):
        own = ["--seed", str(seed), "--batch", str(options.batch)]
        seeded = {
            name: functools.partial(job, name, [*flags, *own])
            for name, (job, flags) in make.items()
        }
        for name, found in harness.rounds(seeded, 1, attempts=2).items():
            runs[name] += found
    return runs


def _aucs(runs: Sequence[jobs.Run]) -> list[float]:
    return [run.results[0]["auc"] for run in runs]


def _section(
    title: str,
    base: str,
    reached: Sequence[float],
    rows: Sequence[Sequence[str]],
    runs: dict[str, list[jobs.Run]],
) -> str:
    head = ("variant", "AUC: median (min..max)", f"more than {base}", "within", "each seed")
    first = (base, spread(reached), "-", "-", "-")
    text = report.table(head, [first, *rows])
    return f"## {title}\n\n{text}\n\nSeeds: {len(reached)}. " + report.foreign_line(
        harness.foreign(runs)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train everything with every seed and write the result page."""
    options = _parse(argv)
    sections = []
    made = {"clicks": modes, NARROW: narrow, JOINS: elastic}
    for task in options.tasks:
        sections.append(made[task](options) if task in made else real(task, options))
        print(sections[-1], end="\n\n", flush=True)
    if options.write:
        path = report.write("ps_quality", CLAIM, sections)
        print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="folder of real records; without: made-up ones")
    every = (*REAL, "clicks", NARROW, JOINS)
    parser.add_argument("--tasks", nargs="+", choices=every, default=list(every))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128, help="of each worker")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the click log")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
