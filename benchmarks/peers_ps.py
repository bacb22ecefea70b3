# SPDX-License-Identifier: Apache-2.0
"""Parameter servers against Paddle's on the same models: one server and two workers on CPU.

Each release of Paddle has an environment of its own; give its interpreter with `--paddle1`
(1.8.5, the last whose sync mode works) or `--paddle2` (2.6.2), and omit one that is not installed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness, jobs, report
from benchmarks.peers_collective import interpreter
from benchmarks.ps_jobs import (
    STEPS,
    WARMUP,
    Bar,
    Make,
    Ours,
    add_usual_options,
    one_process,
    options,
    section,
)
from benchmarks.ps_models import TITLES

CLAIM = (
    "One server and two workers train more examples per second than Paddle's: wide & deep 2 times "
    "Paddle 1.8.5's in sync, 1.5 times the better of 1.8.5 and 2.6.2 in async, 1.3 times in geo; "
    "word2vec 2 times in async, 1.5 times in geo; with no more memory in the server, and at least "
    "0.85 times the examples per CPU second of our own one process. Our queues are drained inside "
    "the timed part, Paddle's are not."
)
PROGRAMS = Path(__file__).parent / "peers"
ALONE = "fleetlight, one process"
MODES = ("sync", "async", "geo")
AT_LEAST = {
    "wide_deep": {"sync": 2.0, "async": 1.5, "geo": 1.3},
    "word2vec": {"async": 2.0, "geo": 1.5},
}
#: Paddle is slower, so its runs have fewer steps
PADDLE_STEPS = {"wide_deep": 300, "word2vec": 1000}
PADDLE_WARMUP = 20
#: releases, and the modes that work there; sync of 2.6.2 dies in its workers
PADDLE_MODES = {"1.8.5": MODES, "2.6.2": ("async", "geo")}


def paddle1_job(python: str, name: str, model: str, mode: str, steps: int) -> jobs.Job:
    """Paddle 1.8.5, started by its own launcher."""
    launcher = [python, "-m", "paddle.distributed.launch_ps", "--server_num", "1"]
    launcher += ["--worker_num", "2", "--log_dir", "log", "--start_port", str(jobs.free_port())]
    return _paddle_job(name, launcher, "paddle1_ps.py", model, mode, steps, {"CPU_NUM": "1"})


def paddle2_job(python: str, name: str, model: str, mode: str, steps: int) -> jobs.Job:
    """Paddle 2.6.2, started by its own launcher."""
    launcher = [python, "-m", "paddle.distributed.launch", "--server_num=1", "--worker_num=2"]
    # else a worker takes the dense values before they are there, and trains zeros
    barrier = {"PADDLE_WITH_GLOO": "1"}
    return _paddle_job(name, launcher, "paddle2_ps.py", model, mode, steps, barrier)


def _paddle_job(
    name: str,
    launcher: list[str],
    program: str,
    model: str,
    mode: str,
    steps: int,
    environment: dict[str, str],
) -> jobs.Job:
    told = [*options(model, steps, PADDLE_WARMUP), "--mode", mode]
    argv = [*launcher, str(PROGRAMS / program), *told]
    return jobs.Job(name, [jobs.Command(argv, environment)])


def variants(model: str, chosen: argparse.Namespace) -> dict[str, Make]:
    """Functions that make a new job of each system, Fleetlight first."""
    steps = chosen.steps or STEPS[model]
    paddle_steps = chosen.paddle_steps or PADDLE_STEPS[model]
    made: dict[str, Make] = {
        ALONE: functools.partial(one_process, ALONE, "fleetlight", model, steps)
    }
    for mode in chosen.modes:
        name = f"fleetlight, {mode}"
        made[name] = Ours(name, model, mode, steps).job
    peers = (("1.8.5", chosen.paddle1, paddle1_job), ("2.6.2", chosen.paddle2, paddle2_job))
    for release, python, job in peers:
        for mode in PADDLE_MODES[release]:
            if python and mode in chosen.modes:
                name = f"paddle {release}, {mode}"
                made[name] = functools.partial(job, python, name, model, mode, paddle_steps)
    return made


def bars(model: str) -> list[Bar]:
    """The bars against each release: both bars together hold against the better one."""
    made = []
    for mode in MODES:
        mine, least = f"fleetlight, {mode}", AT_LEAST[model].get(mode)
        made += [Bar(mine, f"paddle {release}, {mode}", least) for release in PADDLE_MODES]
        made.append(Bar(mine, ALONE, 0.85, "thrift"))
        # the other way round, so that more is better
        made += [Bar(f"paddle {release}, {mode}", mine, 1.0, "memory") for release in PADDLE_MODES]
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every model on every system there is and write the result page."""
    chosen = _parse(argv)
    sections = []
    for model in chosen.models:
        sections.append(_measure(model, chosen))
        print(sections[-1], end="\n\n", flush=True)
    if chosen.write:
        path = report.write("peers_ps", CLAIM, sections)
        print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


def _measure(model: str, chosen: argparse.Namespace) -> str:
    make = variants(model, chosen)
    if chosen.prime:
        # our kernels are compiled once, and then come from files
        for mode in chosen.modes:
            jobs.run(Ours("prime", model, mode, WARMUP).job())
    runs = harness.rounds(make, chosen.rounds, chosen.idle_s, attempts=2)
    return section(TITLES[model], runs, bars(model), harness.foreign(runs))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=sorted(TITLES), default=list(TITLES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    for peer, release in (("paddle1", "1.8.5"), ("paddle2", "2.6.2")):
        words = f"interpreter that has Paddle {release}; left out when not given"
        parser.add_argument(f"--{peer}", type=interpreter, metavar="PYTHON", help=words)
    parser.add_argument("--steps", type=int, help="timed steps of each of our workers")
    parser.add_argument("--paddle_steps", type=int, help="timed steps of each of Paddle's")
    add_usual_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
