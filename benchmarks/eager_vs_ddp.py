# SPDX-License-Identifier: Apache-2.0
"""Steps per second of Fleetlight's eager data parallel against torch's DistributedDataParallel.

Gloo processes with one thread each, two by default, train every variant's own copy of the model in
turn. `ddp` is listed twice: the ratio of the two is the noise of the measurement.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks import interleave, jobs, report
from benchmarks.models import WORKLOADS, Workload

CLAIM = (
    "Fleetlight's eager data parallel keeps at least 98 % of the steps per second of plain "
    "DistributedDataParallel: Gloo processes of one host, one thread each."
)
AT_LEAST = 0.98
# (turns per round, steps per turn): short turns, so that both variants see the same machine load
TURNS = {"mlp": (40, 25), "mlp8": (40, 25), "resnet50": (4, 2), "resnet50_224": (2, 1)}
Parallel = tuple[nn.Module, torch.optim.Optimizer]


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parallel:
    """Plain DistributedDataParallel with its defaults."""
    return DistributedDataParallel(model), optimizer


def ddp_view(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parallel:
    """DistributedDataParallel without its copy of every gradient."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parallel:
    """Fleetlight with its defaults."""
    import fleetlight as fleet

    return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)


VARIANTS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Parallel]] = {
    "ddp": ddp,
    "ddp again": ddp,
    "ddp view": ddp_view,
    "fleetlight": ours,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every workload and write the result page."""
    options = _parse(argv)
    if options.worker:
        _work(options)
        return 0
    sections = (_measure(n, name, options) for n in options.processes for name in options.workloads)
    report.page("eager_vs_ddp", CLAIM, sections)
    return 0


def _measure(processes: int, name: str, options: argparse.Namespace) -> str:
    """One workload in one group of processes, as a section of the result page."""
    argv = [sys.executable, "-m", "benchmarks.eager_vs_ddp", "--worker", name]
    argv += ["--rounds", str(options.rounds), "--variants", *options.variants]
    job = jobs.Job(name, jobs.workers(argv, processes), processes, options.deadline_s)
    found = sorted(jobs.run(job).results, key=lambda result: int(result["rank"]))
    _agreed(found)
    workers = [result["rounds"] for result in found]
    series = interleave.series(workers)
    base, *rest = series
    ratios = [
        report.Ratio(one, base, AT_LEAST if one.name == "fleetlight" else None) for one in rest
    ]
    return report.section(
        f"{WORKLOADS[name].title}: {processes} processes",
        series,
        ratios,
        foreign=interleave.foreign(workers),
    )


def _agreed(found: Sequence[dict[str, dict[str, float]]]) -> None:
    """Workers that exchange gradients end with the same parameters."""
    sums = [result["parameters"] for result in found]
    if any(other != sums[0] for other in sums):
        raise jobs.BenchmarkError(f"the workers' parameters differ: sums {sums}")


def _work(options: argparse.Namespace) -> None:
    """One of the workers."""
    torch.set_num_threads(1)
    with_fleet = "fleetlight" in options.variants
    _join(with_fleet)
    _train(options)
    if not with_fleet:
        # The models are gone by now: where DDP's reducer outlives the group, freeing it joins a
        # thread of the group's that may be waiting for the interpreter's lock, which we hold.
        dist.destroy_process_group()


def _train(options: argparse.Namespace) -> None:
    workload = WORKLOADS[options.worker]
    models, steps = {}, {}
    for name in options.variants:
        models[name], steps[name] = variant(workload, VARIANTS[name])
    turns, count = TURNS[options.worker]
    interleave.interleave(steps, 1, 1, max(3, count), dist.barrier)  # to warm up
    rounds = interleave.interleave(steps, options.rounds, turns, count, dist.barrier)
    sums = {name: _sum(model) for name, model in models.items()}
    jobs.result(rank=dist.get_rank(), rounds=rounds, parameters=sums)
    dist.barrier()


def _join(with_fleet: bool) -> None:
    if with_fleet:
        import fleetlight as fleet

        fleet.init(is_collective=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def variant(
    workload: Workload, parallel: Callable[[nn.Module, torch.optim.Optimizer], Parallel]
) -> tuple[nn.Module, Callable[[], None]]:
    """A new parallel model, and the function that trains it for one step."""
    torch.manual_seed(0)
    plain = workload.model()
    model, optimizer = parallel(plain, workload.optimizer(plain))
    batches = workload.batches(8, seed=1 + dist.get_rank())
    return plain, functools.partial(_step, model, optimizer, batches)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    batches.append(batches.pop(0))
    x, y = batches[-1]
    loss = cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _sum(model: nn.Module) -> float:
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="for each workload")
    default = ["mlp", "mlp8", "resnet50"]
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=default)
    shown = ["ddp", "ddp again", "fleetlight"]
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=shown, help="ratios are to the first"
    )
    parser.add_argument("--worker", choices=WORKLOADS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
