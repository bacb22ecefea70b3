# SPDX-License-Identifier: Apache-2.0
"""Model quality with the settings for slow networks, against synchronous training.

All modes use the same number of samples, the same first values, the same optimizer and the same
learning rates. `--data` is a folder with MNIST's test files, a tar of CIFAR-10's JPEGs and a text
`input.txt`, at any depth; a task without its files can be omitted.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import curves, forked, jobs, report
from benchmarks.slow_modes import INT8, TOPK, Settings
from benchmarks.slow_quality_data import AGAIN, DGC, SYNC, TASKS, put
from benchmarks.slow_quality_train import work

CLAIM = (
    "LocalSGD with k = 4, adaptive LocalSGD, DiLoCo, int8 and DGC each end within 1 point of "
    "accuracy, or 2 % of the loss, of synchronous training on the same number of real samples."
)
#: points of accuracy, as a part of one, and the part of the loss
ACCURACY, LOSS = 0.01, 0.02
H = 20
#: modes that the claim does not speak of
NO_BAR = {"top 1 %", AGAIN}


def modes(task: str, steps: int) -> dict[str, Settings]:
    """What is compared on a task; workers train alone after the first tenth of the steps."""
    begin = {"begin_step": steps // 10}
    made: dict[str, Settings] = {
        SYNC: {},
        # the same in another order of additions: how far chance alone leads away
        AGAIN: {"shared_memory": True},
        "LocalSGD, k = 4": _one("localsgd", k_steps=4, **begin),
        "adaptive LocalSGD, from k = 4": _one("adaptive_localsgd", init_k_steps=4, **begin),
        f"DiLoCo, H = {H}": _one("diloco", k_steps=H, **begin),
        "int8": INT8,
        "top 1 %": TOPK,
    }
    if TASKS[task].has_momentum:
        # the models are small, so that small parameters count, too
        ramp = {"rampup_begin_step": steps // 10, "rampup_step": steps // 5}
        sparsity = [0.75, 0.9375, 0.984, 0.996, 0.999]
        made[DGC] = _one("dgc", **ramp, sparsity=sparsity, min_size=1024)
    return {name: made[name] for name in TASKS[task].only or made}


def _one(name: str, **configs: object) -> Settings:
    return {name: True, f"{name}_configs": configs}


@dataclasses.dataclass(frozen=True)
class Reached:
    """What one mode has reached with each seed, beside synchronous training."""

    name: str
    accuracy: Sequence[float]
    loss: Sequence[float]
    beside_accuracy: Sequence[float]
    beside_loss: Sequence[float]
    classifies: bool

    @property
    def points(self) -> list[float]:
        """Points of accuracy that it has more, with each seed."""
        pairs = zip(self.accuracy, self.beside_accuracy, strict=True)
        return [100 * (mine - other) for mine, other in pairs]

    @property
    def losses(self) -> list[float]:
        """Per cent of the loss that it has more, with each seed."""
        return [100 * (a / b - 1) for a, b in zip(self.loss, self.beside_loss, strict=True)]

    @property
    def verdict(self) -> str:
        """Whether the median keeps the bar of its task."""
        if self.name in NO_BAR or self.name == SYNC:
            return "-"
        if self.classifies:
            kept, limit = statistics.median(self.points) >= -100 * ACCURACY, "-1 point"
        else:
            kept, limit = statistics.median(self.losses) <= 100 * LOSS, "+2 %"
        return f"{limit}: {'met' if kept else 'missed'}"

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        return (
            self.name,
            *([_spread([100 * one for one in self.accuracy], ".2f")]),
            _spread(self.points, "+.2f"),
            _spread(self.loss, ".4f"),
            _spread(self.losses, "+.2f"),
            self.verdict,
        )


def _spread(values: Sequence[float], form: str) -> str:
    of = report.Spread.of(values)
    return f"{of.median:{form}} ({of.low:{form}}..{of.high:{form}})"


def measured(name: str, options: argparse.Namespace) -> tuple[str, str]:
    """A section of the page, and its chart."""
    task = TASKS[name]
    epochs = options.epochs or task.epochs
    runs: dict[str, list[jobs.Run]] = {}
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            put(name, Path(options.data), seed, Path(folder))
            steps = epochs * math.ceil(_examples(name, folder) / (options.workers * task.batch))
            common = {"task": name, "folder": folder, "seed": seed, "epochs": epochs}
            found = {
                mode: _run(mode, {**common, "batch": task.batch, "settings": settings}, options)
                for mode, settings in modes(name, steps).items()
                if not options.modes or mode in options.modes
            }
        for mode, run in found.items():
            runs.setdefault(mode, []).append(run)
    return _section(name, steps, runs, options), _chart(name, runs)


def _examples(name: str, folder: str) -> int:
    stored = torch.load(Path(folder) / f"{name}.pt", weights_only=True)
    return len(stored["train"][0])


def _run(mode: str, asked: Mapping[str, Any], options: argparse.Namespace) -> jobs.Run:
    run = forked.run(mode, work, asked, options.workers)
    sums = {result["checksum"] for result in run.results}
    if len(sums) > 1:
        raise jobs.BenchmarkError(f"{mode}: the workers' parameters differ: sums {sums}")
    one = run.results[0]
    print(
        f"{asked['task']}, seed {asked['seed']}, {mode}: accuracy {one['accuracy']:.4f}, "
        f"loss {one['loss']:.4f}, {run.wall_s:.0f} s",
        flush=True,
    )
    return run


def _section(
    name: str, steps: int, runs: Mapping[str, Sequence[jobs.Run]], options: argparse.Namespace
) -> str:
    task, one = TASKS[name], runs[SYNC][0].results[0]
    title = (
        f"{task.title}: {one['examples']:,} samples in {steps} steps of {options.workers} workers "
        f"with {task.batch} each, {one['parameters']:,} parameters"
    )
    rows = [_reached(mode, runs, task.classifies).row() for mode in runs]
    head = (
        *("mode", "accuracy, %: median (min..max)", f"points more than {SYNC}"),
        *("test loss", "per cent more", "bar"),
    )
    tested = f"Tested on {one['tested']:,} records that nobody trains on."
    shares = [run.foreign for of in runs.values() for run in of]
    return (
        f"## {title}\n\n{report.table(head, rows)}\n\n{tested} Seeds: {options.seeds}. "
        f"{report.foreign_line(shares)}"
    )


def _reached(mode: str, runs: Mapping[str, Sequence[jobs.Run]], classifies: bool) -> Reached:
    mine, sync = ([run.results[0] for run in runs[of]] for of in (mode, SYNC))
    values = [[one[what] for one in of] for of in (mine, sync) for what in ("accuracy", "loss")]
    return Reached(mode, values[0], values[1], values[2], values[3], classifies)


def _chart(name: str, runs: Mapping[str, Sequence[jobs.Run]]) -> str:
    """The training loss along the samples: medians over the seeds of means over the workers."""
    lines = {mode: _line([_curve(run) for run in of]) for mode, of in runs.items()}
    examples = next(iter(runs.values()))[0].results[0]["examples"]
    across = f"per cent of {examples:,} samples"
    return curves.chart(TASKS[name].title, across, "training loss", lines)


def _curve(run: jobs.Run) -> list[float]:
    each = [result["curve"] for result in run.results]
    return [statistics.fmean(values) for values in zip(*each, strict=True)]


def _line(seeds: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    medians = [statistics.median(values) for values in zip(*seeds, strict=True)]
    return [(100 * (number + 0.5) / len(medians), y) for number, y in enumerate(medians)]


def main(argv: Sequence[str] | None = None) -> int:
    """Train everything with every seed and write the result page."""
    options = _parse(argv)
    forked.preload()
    day = datetime.date.today().isoformat()
    sections = [NOTES.format(begin="the first tenth of the steps")]
    for name in options.tasks:
        section, chart = measured(name, options)
        print(section, end="\n\n", flush=True)
        file = f"{day}-{options.name}-{name}.svg"
        sections += [section, f"![Training loss along the samples]({file})"]
        if options.write:
            report.RESULTS.mkdir(parents=True, exist_ok=True)
            (report.RESULTS / file).write_text(chart, encoding="utf-8")
    if options.write:
        path = report.write(options.name, CLAIM, sections)
        print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


NOTES = (
    "All modes of a task have the same optimizer, learning rates and batches: SGD with momentum "
    "0.9 and weight decay 0.0005 from 0.1 on for images, AdamW from 0.002 on for text, and there "
    "once more, for DGC, SGD with Nesterov's momentum from 0.2 on; the rate falls to a hundredth "
    "along a cosine. No mode was tuned on a task; modes have their defaults, but for what their "
    "names say and this: adaptive LocalSGD starts with k = 4, and those that train alone, like "
    "DGC, begin after {begin}; DGC reaches its last sparsity a fifth of the steps later and takes "
    "parameters of 1,024 values and more, as int8 and top 1 % do. The "
    "workers are on one machine and do not share memory, so that codecs work; `synchronous again` "
    "does share it, adds in another order and so shows how far chance alone leads. How small a "
    "model may be for DGC: in a first trial with 6,138 parameters it ended 1.9 points below."
)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of the real records")
    parser.add_argument("--name", default="slow_quality", help="name of the result page")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["digits", "text", "text-sgd"])
    parser.add_argument("--modes", nargs="+", help="only these, by name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, help="in place of the usual ones")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
