# SPDX-License-Identifier: Apache-2.0
"""The cost of settings for slow networks on one host: two workers.

Each setting has a pair of Gloo processes, in which it trains in turn with plain
DistributedDataParallel, one thread each. DDP is listed twice: the ratio of the two is the noise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import interleave, jobs, report
from benchmarks.eager_vs_ddp import ddp, ours, variant
from benchmarks.models import WORKLOADS
from benchmarks.slow_modes import DGC, INT8, LEVELS, Settings, localsgd, narrow

CLAIM = (
    "A setting for slow networks that is switched on where it is useless, on one host, keeps at "
    "least 97 % of the steps per second of plain DistributedDataParallel and takes at most 3 % "
    "more CPU; `explain()` says that it is useless."
)
AT_LEAST = 0.97
#: later than any step of this benchmark
NEVER = 10**9
MODES: Mapping[str, Settings] = {
    "nothing": {},
    "by levels": LEVELS,
    "bf16": narrow("bf16"),
    "int8": INT8,
    "DGC": DGC,
    "LocalSGD, k = 1": localsgd(1),
    "LocalSGD, not yet": {
        "localsgd": True,
        "localsgd_configs": {"k_steps": 4, "begin_step": NEVER},
    },
    "DiLoCo, not yet": {"diloco": True, "diloco_configs": {"begin_step": NEVER}},
}
#: DGC is for SGD with momentum
ONLY = {"DGC": ("tiny", "resnet50")}
#: (turns per round, steps per turn): short turns, so that both meet the same machine
TURNS = {"tiny": (20, 50), "mlp": (20, 25), "mlp8": (20, 25), "resnet50": (3, 2)}
DDP, AGAIN, OURS = "ddp", "ddp again", "fleetlight"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every setting on every workload and write the result page."""
    options = _parse(argv)
    if options.worker:
        _work(options)
        return 0
    sections = (_measure(name, options) for name in options.workloads)
    report.page("local_cost", CLAIM, sections, keep=options.write)
    return 0


def _measure(workload: str, options: argparse.Namespace) -> str:
    """One workload with each setting, a pair of processes each."""
    modes = [mode for mode in options.modes if workload in ONLY.get(mode, TURNS)]
    rows, shares, said = [], [], []
    for mode in modes:
        found = _pair(workload, mode, options)
        workers = [result["rounds"] for result in found]
        series = {one.name: one for one in interleave.series(workers)}
        rows.append(row(mode, series))
        print(f"{workload}, {mode}: {rows[-1][1]} times as fast", flush=True)
        shares += interleave.foreign(workers)
        said += [(mode, sentence) for sentence in found[0]["inert"]]
    parts = [
        f"## {WORKLOADS[workload].title}",
        report.table(
            (
                *("setting", "steps/s over DDP's: median (min..max)", "at least"),
                *("DDP again", "CPU over DDP's", "at most"),
            ),
            rows,
        ),
        report.table(("setting", "what the job is told of it"), said),
        f"Rounds: {options.rounds}. {report.foreign_line(shares)}",
    ]
    return "\n\n".join(parts)


def row(mode: str, series: Mapping[str, report.Series]) -> tuple[str, ...]:
    """A line of the table: speed, noise, cost."""
    mine, base = series[OURS], series[DDP]
    ratio = report.Ratio(mine, base, AT_LEAST)
    cpu = report.Spread.of([a / b for a, b in zip(mine.cpu_ms, base.cpu_ms, strict=True)])
    most = 2 - AT_LEAST
    return (
        mode,
        str(ratio.spread),
        ratio.verdict,
        str(report.Ratio(series[AGAIN], base).spread),
        str(cpu),
        f"{report.short(most)}: {'met' if cpu.median <= most else 'missed'}",
    )


def _pair(workload: str, mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    argv = [sys.executable, "-m", "benchmarks.local_cost", "--worker", workload]
    argv += ["--rounds", str(options.rounds), "--modes", mode]
    argv += ["--quick"] if options.quick else []
    job = jobs.Job(f"{workload}, {mode}", jobs.workers(argv), deadline_s=options.deadline_s)
    found = sorted(jobs.run(job).results, key=lambda result: int(result["rank"]))
    sums = [result["parameters"] for result in found]
    if any(other != sums[0] for other in sums):
        raise jobs.BenchmarkError(f"{job.name}: the workers' parameters differ: sums {sums}")
    return found


def _work(options: argparse.Namespace) -> None:
    """One of the two workers."""
    import fleetlight as fleet

    torch.set_num_threads(1)
    strategy = fleet.DistributedStrategy(**MODES[options.modes[0]])
    fleet.init(is_collective=True, strategy=strategy)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    makers = {DDP: ddp, AGAIN: ddp, OURS: ours}
    made = {name: variant(WORKLOADS[options.worker], maker) for name, maker in makers.items()}
    steps = {name: step for name, (_, step) in made.items()}
    turns, count = (1, 3) if options.quick else TURNS[options.worker]
    interleave.interleave(steps, 1, 1, max(3, count), dist.barrier)  # to warm up
    rounds = interleave.interleave(steps, options.rounds, turns, count, dist.barrier)
    fleet.barrier_worker()
    sums = {name: _sum(model) for name, (model, _) in made.items()}
    jobs.result(rank=dist.get_rank(), rounds=rounds, parameters=sums, inert=strategy.inert())
    dist.barrier()


def _sum(model: torch.nn.Module) -> float:
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="for each pair")
    default = ["mlp", "tiny", "resnet50"]
    parser.add_argument("--workloads", nargs="+", choices=TURNS, default=default)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--quick", action="store_true", help="a few steps to see that it works")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--worker", choices=TURNS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
