# SPDX-License-Identifier: Apache-2.0
"""Steps per second of static programs against torch's DistributedDataParallel, plain and compiled.

Two Gloo processes with one thread each train every variant's own copy of the model in turn. `ddp`
may be listed twice: the ratio of the two is the noise of the measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks import interleave, jobs, report
from benchmarks.models import WORKLOADS, Workload

CLAIM = (
    "Static programs beside DistributedDataParallel with gradient_as_bucket_view, 2 Gloo "
    "processes, one thread each. Generated Python: at least 1.10 times its steps per second on the "
    "small MLP and 0.92 times on ResNet-50; compiled by inductor 1.3 times on the small MLPs. The "
    "better of the two beside torch.compile(DDP): at least 0.93 times, 1.2 times on the small MLPs."
    " Capturing costs at most 0.3 s of CPU for an MLP and 3 s for ResNet-50."
)
# (turns per round, steps per turn): short turns, so that all variants see the same machine load
TURNS = {"tiny": (20, 40), "mnist": (20, 30), "mlp8": (20, 20), "resnet50": (3, 2)}
#: of a variant over another, the least the median may be
BARS: dict[tuple[str, str], Mapping[str, float]] = {
    ("static fx", "ddp"): {"tiny": 1.10, "resnet50": 0.92},
    ("static inductor", "ddp"): {"tiny": 1.3, "mnist": 1.3, "mlp8": 1.3},
    ("best static", "compiled ddp"): {"tiny": 1.2, "mnist": 1.2, "mlp8": 1.2, "resnet50": 0.93},
}
Step = Callable[[], object]
Batches = list[tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model being trained: its step, and what it cost to make ready, in CPU seconds."""

    model: nn.Module
    step: Step
    prepared_s: float = 0.0


def ddp(workload: Workload, batches: Batches) -> Variant:
    """DistributedDataParallel without its copy of every gradient."""
    return _eager(workload, batches, lambda model: model)


def fused_ddp(workload: Workload, batches: Batches) -> Variant:
    """The same with torch's fused optimizer, which programs have, too."""
    return _eager(workload, batches, lambda model: model, fused=True)


def compiled_ddp(workload: Workload, batches: Batches) -> Variant:
    """The same, compiled by inductor."""
    return _eager(workload, batches, torch.compile)


def _eager(
    workload: Workload, batches: Batches, made: Callable[[Any], Any], fused: bool = False
) -> Variant:
    plain = workload.model()
    optimizer = workload.optimizer(plain)
    if fused:
        known = optimizer.defaults
        optimizer = type(optimizer)(plain.parameters(), **{**known, "fused": True})
    model = made(DistributedDataParallel(plain, gradient_as_bucket_view=True))
    return Variant(plain, functools.partial(_eager_step, model, optimizer, batches))


def _eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    x, y = _next(batches)
    loss = cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def static(compile: str, workload: Workload, batches: Batches) -> Variant:
    """A captured program."""
    import fleetlight as fleet

    model = workload.model()
    optimizer = fleet.distributed_optimizer(workload.optimizer(model))
    x, y = batches[0]
    began = time.process_time()
    program = fleet.static.capture(model, cross_entropy, optimizer, {"x": x, "y": y})
    assert program.form.graph.nodes
    spent = time.process_time() - began
    executor = fleet.static.Executor(compile=compile)

    def step() -> None:
        x, y = _next(batches)
        executor.run(program, {"x": x, "y": y}, ["loss"])

    return Variant(model, step, spent)


def _next(batches: Batches) -> tuple[Tensor, Tensor]:
    batches.append(batches.pop(0))
    return batches[-1]


VARIANTS: dict[str, Callable[[Workload, Batches], Variant]] = {
    "ddp": ddp,
    "ddp again": ddp,
    "ddp fused": fused_ddp,
    "compiled ddp": compiled_ddp,
    "static fx": functools.partial(static, "fx"),
    "static inductor": functools.partial(static, "inductor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every workload and write the result page."""
    options = _parse(argv)
    if options.worker:
        _work(options)
        return 0
    sections = (_measure(name, options) for name in options.workloads)
    report.page("static_vs_ddp", CLAIM, sections, keep=not options.quick)
    return 0


def _measure(name: str, options: argparse.Namespace) -> str:
    """One workload in one pair of processes, as a section of the result page."""
    argv = [sys.executable, "-m", "benchmarks.static_vs_ddp", "--worker", name]
    argv += ["--rounds", str(options.rounds), "--variants", *options.variants]
    argv += ["--quick"] if options.quick else []
    job = jobs.Job(name, jobs.workers(argv), deadline_s=options.deadline_s)
    found = sorted(jobs.run(job).results, key=lambda result: int(result["rank"]))
    _agreed(found)
    workers = [result["rounds"] for result in found]
    series = interleave.series(workers)
    text = report.section(
        WORKLOADS[name].title, series, ratios(name, series), interleave.foreign(workers)
    )
    return f"{text}\n\n{_preparation(found)}"


def ratios(workload: str, series: Sequence[report.Series]) -> list[report.Ratio]:
    """Each over plain DDP, and the best of ours over the compiled one, with what is claimed."""
    known = {one.name: one for one in series}
    base, *rest = series
    pairs = [(one, base) for one in rest]
    ours = [one for one in series if one.name.startswith("static")]
    if ours and "compiled ddp" in known:
        pairs.append((_best(ours), known["compiled ddp"]))
    return [
        report.Ratio(over, under, BARS.get((over.name, under.name), {}).get(workload))
        for over, under in pairs
    ]


def _best(ours: Sequence[report.Series]) -> report.Series:
    """That of the highest median: whoever trains chooses once."""
    best = max(ours, key=lambda one: report.Spread.of(one.rates).median)
    return dataclasses.replace(best, name="best static")


def _agreed(found: Sequence[dict[str, dict[str, float]]]) -> None:
    """Workers that exchange gradients end with the same parameters."""
    sums = [result["parameters"] for result in found]
    if any(other != sums[0] for other in sums):
        raise jobs.BenchmarkError(f"the workers' parameters differ: sums {sums}")


def _preparation(found: Sequence[dict[str, dict[str, list[float]]]]) -> str:
    """What capturing and the first steps cost: the slowest worker's."""
    rows = [
        (name, *(report.short(max(r["prepared"][name][i] for r in found)) for i in range(2)))
        for name in found[0]["prepared"]
    ]
    return report.table(("variant", "CPU s to capture", "CPU s of the first steps"), rows)


def _work(options: argparse.Namespace) -> None:
    """One of the two workers."""
    torch.set_num_threads(1)
    _join(options.variants)
    workload = WORKLOADS[options.worker]
    turns, count = (1, 2) if options.quick else TURNS[options.worker]
    if any(name.startswith("static") for name in options.variants):
        _warm_up()
    variants = {name: _variant(workload, VARIANTS[name]) for name in options.variants}
    first = {name: _first_steps(variant.step) for name, variant in variants.items()}
    steps = {name: variant.step for name, variant in variants.items()}
    interleave.interleave(steps, 1, 1, max(3, count), dist.barrier)
    rounds = interleave.interleave(steps, options.rounds, turns, count, dist.barrier)
    jobs.result(
        rank=dist.get_rank(),
        rounds=rounds,
        parameters={name: _sum(variant.model) for name, variant in variants.items()},
        prepared={name: (v.prepared_s, first[name]) for name, v in variants.items()},
    )
    dist.barrier()


def _join(variants: Sequence[str]) -> None:
    if any(name.startswith("static") for name in variants):
        import fleetlight as fleet

        fleet.init(is_collective=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def _warm_up() -> None:
    """A capture of something else: the first one of a process imports a lot."""
    import fleetlight as fleet

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"x": torch.rand(3, 2), "y": torch.zeros(3, dtype=torch.long)}
    fleet.static.capture(model, cross_entropy, optimizer, inputs)


def _variant(workload: Workload, made: Callable[[Workload, Batches], Variant]) -> Variant:
    """A fresh model, the same on all workers, with batches of this worker."""
    torch.manual_seed(0)
    return made(workload, workload.batches(8, seed=1 + dist.get_rank()))


def _first_steps(step: Step) -> float:
    """CPU seconds of two steps: what is compiled is compiled in them."""
    dist.barrier()
    began = time.process_time()
    step()
    step()
    return time.process_time() - began


def _sum(model: nn.Module) -> float:
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="for each workload")
    parser.add_argument("--workloads", nargs="+", choices=TURNS, default=list(TURNS))
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="the first is 1.0"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps to see that it works; writes no page"
    )
    parser.add_argument("--worker", choices=TURNS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
