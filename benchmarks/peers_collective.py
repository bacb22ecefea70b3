# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training on CPU against Paddle and MindSpore: the same models, 2 processes.

Each peer has an environment of its own; give its interpreter with `--paddle` or
`--mindspore`, and omit a peer that is not installed.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import harness, jobs, report
from benchmarks.models import WORKLOADS

CLAIM = (
    "Fleetlight's eager data parallel is faster than Paddle and MindSpore on the same models: "
    "2 CPU processes, `OMP_NUM_THREADS=1` for every process of every system."
)
PROGRAMS = Path(__file__).parent / "peers"
MODELS = ("mlp", "resnet50", "resnet50_224")
STEPS = {"mlp": 3000, "resnet50": 12, "resnet50_224": 3}
# MindSpore's convolutions take seconds a step on CPU; fewer steps keep the machine comparable.
MINDSPORE_STEPS = {"mlp": 3000, "resnet50": 5, "resnet50_224": 1}
AT_LEAST = {
    ("mlp", "paddle"): 1.1,
    ("mlp", "mindspore"): 1.5,
    ("resnet50", "paddle"): 1.2,
    ("resnet50", "mindspore"): 5.0,
}


def torch_job(system: str, model: str) -> jobs.Job:
    """Fleetlight or DistributedDataParallel, its workers started by hand."""
    program = [sys.executable, str(PROGRAMS / "torch_dp.py"), "--system", system]
    return jobs.Job(system, jobs.workers([*program, *_options(model, STEPS[model])]))


def paddle_job(python: str, model: str) -> jobs.Job:
    """Paddle, started by its own launcher."""
    launcher = [python, "-m", "paddle.distributed.launch", "--nproc_per_node=2"]
    program = str(PROGRAMS / "paddle_dp.py")
    return jobs.Job("paddle", [jobs.Command([*launcher, program, *_options(model, STEPS[model])])])


def mindspore_job(python: str, model: str) -> jobs.Job:
    """MindSpore's scheduler and two workers."""
    argv = [python, str(PROGRAMS / "mindspore_dp.py"), *_options(model, MINDSPORE_STEPS[model])]
    meeting = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1"}
    meeting["MS_SCHED_PORT"] = str(jobs.free_port())
    roles = ("MS_SCHED", "MS_WORKER", "MS_WORKER")
    commands = [jobs.Command(argv, {**meeting, "MS_ROLE": role}) for role in roles]
    return jobs.Job("mindspore", commands)


def _options(model: str, steps: int) -> list[str]:
    return ["--model", model, "--steps", str(steps), "--warmup", "3" if steps > 3 else "1"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every model on every system there is and write the result page."""
    options = _parse(argv)
    sections = []
    for model in options.models:
        sections.append(_measure(model, options))
        print(sections[-1], end="\n\n", flush=True)
    path = report.write("peers_collective", CLAIM, sections)
    print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


def _measure(model: str, options: argparse.Namespace) -> str:
    runs = harness.rounds(_jobs(model, options), options.rounds, options.idle_s)
    for of in runs.values():
        for one in of:
            _agreed(one)
    base, *peers = harness.series(runs).values()
    bars = AT_LEAST if base.name == "fleetlight" else {}
    ratios = [report.Ratio(base, peer, bars.get((model, peer.name))) for peer in peers]
    text = report.section(
        WORKLOADS[model].title, [base, *peers], ratios, foreign=harness.foreign(runs)
    )
    systems = "; ".join(of[0].results[0]["system"] for of in runs.values())
    return f"{text} Systems: {systems}."


def _jobs(model: str, options: argparse.Namespace) -> dict[str, Callable[[], jobs.Job]]:
    """Functions that make a new job of each system; the first system is the base of ratios."""
    make: dict[str, Callable[[], jobs.Job]] = {
        name: functools.partial(torch_job, name, model) for name in options.torch
    }
    if options.paddle:
        make["paddle"] = functools.partial(paddle_job, options.paddle, model)
    if options.mindspore:
        make["mindspore"] = functools.partial(mindspore_job, options.mindspore, model)
    return make


def _agreed(one: jobs.Run) -> None:
    """Workers that exchange gradients end with the same parameters."""
    first, *others = (result["parameters"] for result in one.results)
    if any(abs(other - first) > 1e-6 * abs(first) for other in others):
        raise jobs.BenchmarkError(f"the workers' parameters differ: {one.results}")


def interpreter(text: str) -> str:
    """An absolute path, because jobs start in a folder of their own."""
    found = shutil.which(os.path.expanduser(text))
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected the path of a Python interpreter")
    return os.path.abspath(found)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp", "resnet50"])
    for peer in ("paddle", "mindspore"):
        words = f"interpreter that has {peer}; left out when not given"
        parser.add_argument(f"--{peer}", type=interpreter, metavar="PYTHON", help=words)
    parser.add_argument("--idle_s", type=float, default=0.0, help="wait for an idle machine first")
    parser.add_argument(
        "--torch", nargs="+", choices=("fleetlight", "ddp"), default=["fleetlight", "ddp"]
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
