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

from benchmarks import interleave, jobs, report
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


def torch_job(system: str, model: str, steps: int) -> jobs.Job:
    """Fleetlight or DistributedDataParallel, its workers started by hand."""
    program = [sys.executable, str(PROGRAMS / "torch_dp.py"), "--system", system]
    return jobs.Job(system, jobs.workers([*program, *_options(model, steps)]))


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
    parser = interleave.parser(__doc__, rounds=5)
    add_peer(parser, "paddle", "Paddle")
    add_peer(parser, "mindspore", "MindSpore")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp", "resnet50"])
    options = parser.parse_args(argv)
    sections = (_measure(model, options) for model in options.models)
    return report.page("peers_collective", CLAIM, sections, options.quick)


def _measure(model: str, options: argparse.Namespace) -> str:
    make = _jobs(model, options)
    runs = interleave.run_jobs(make, 1 if options.quick else options.rounds, options.idle_s)
    for of in runs.values():
        for one in of:
            jobs.check_same(one, "parameters", 1e-6)
    base, *peers = interleave.job_series(runs).values()
    ratios = [report.Ratio(base, peer, AT_LEAST.get((model, peer.name))) for peer in peers]
    foreign = interleave.job_foreign(runs)
    text = report.section(WORKLOADS[model].title, [base, *peers], ratios, foreign)
    systems = "; ".join(of[0].results[0]["system"] for of in runs.values())
    return f"{text} Systems: {systems}."


def _jobs(model: str, options: argparse.Namespace) -> dict[str, Callable[[], jobs.Job]]:
    """Functions that make a new job of each system; the first system is the base of ratios."""
    make: dict[str, Callable[[], jobs.Job]] = {
        name: functools.partial(torch_job, name, model, 4 if options.quick else STEPS[model])
        for name in ("fleetlight", "ddp")
    }
    if options.paddle:
        make["paddle"] = functools.partial(paddle_job, options.paddle, model)
    if options.mindspore:
        make["mindspore"] = functools.partial(mindspore_job, options.mindspore, model)
    return make


def add_peer(parser: argparse.ArgumentParser, peer: str, title: str) -> None:
    """The flag of a peer: the interpreter of its environment."""
    words = f"interpreter that has {title}; left out when not given"
    parser.add_argument(f"--{peer}", type=_interpreter, metavar="PYTHON", help=words)


def _interpreter(text: str) -> str:
    """An absolute path, because jobs start in a folder of their own."""
    found = shutil.which(os.path.expanduser(text))
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected the path of a Python interpreter")
    return os.path.abspath(found)


if __name__ == "__main__":
    sys.exit(main())
