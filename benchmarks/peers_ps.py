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

from benchmarks import interleave, jobs, ps
from benchmarks.peers_collective import PROGRAMS, add_peer
from benchmarks.ps import MODES, Bar, Make, Ours, one_process

CLAIM = (
    "One server and two workers train more examples per second than Paddle's: wide & deep 2 times "
    "Paddle 1.8.5's in sync, 1.5 times the better of 1.8.5 and 2.6.2 in async, 1.3 times in geo; "
    "word2vec 2 times in async, 1.5 times in geo; with no more memory in the server, and at least "
    "0.85 times the examples per CPU second of our own one process. Our queues are drained inside "
    "the timed part, Paddle's are not."
)
ALONE = "fleetlight, one process"
AT_LEAST = {
    "wide_deep": {"sync": 2.0, "async": 1.5, "geo": 1.3},
    "word2vec": {"async": 2.0, "geo": 1.5},
}
#: Paddle is slower, so its runs have fewer steps
PADDLE_STEPS = {"wide_deep": 300, "word2vec": 1000}
#: releases, and the modes that work there; sync of 2.6.2 dies in its workers
PADDLE_MODES = {"1.8.5": MODES, "2.6.2": ("async", "geo")}


def paddle(release: str, python: str, name: str, told: Sequence[str]) -> jobs.Job:
    """A release of Paddle, started by its own launcher."""
    if release == "1.8.5":
        argv = [python, "-m", "paddle.distributed.launch_ps", "--server_num", "1"]
        argv += ["--worker_num", "2", "--log_dir", "log", "--start_port", str(jobs.free_port())]
        argv, own = [*argv, str(PROGRAMS / "paddle1_ps.py")], {"CPU_NUM": "1"}
    else:
        argv = [python, "-m", "paddle.distributed.launch", "--server_num=1", "--worker_num=2"]
        # else a worker takes the dense values before they are there, and trains zeros
        argv, own = [*argv, str(PROGRAMS / "paddle2_ps.py")], {"PADDLE_WITH_GLOO": "1"}
    return jobs.Job(name, [jobs.Command([*argv, *told], own)])


def variants(model: str, steps: int, options: argparse.Namespace) -> dict[str, Make]:
    """Functions that make a new job of each system, Fleetlight first."""
    made: dict[str, Make] = {ALONE: one_process(ALONE, "fleetlight", model, steps)}
    for mode in MODES:
        made[f"fleetlight, {mode}"] = Ours(f"fleetlight, {mode}", model, mode, steps).job
    for release, python in (("1.8.5", options.paddle1), ("2.6.2", options.paddle2)):
        for mode in PADDLE_MODES[release] if python else ():
            name = f"paddle {release}, {mode}"
            told = [*ps.told(model, min(steps, PADDLE_STEPS[model]), 20), "--mode", mode]
            made[name] = functools.partial(paddle, release, python, name, told)
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
    parser = interleave.parser(__doc__, rounds=3)
    add_peer(parser, "paddle1", "Paddle 1.8.5")
    add_peer(parser, "paddle2", "Paddle 2.6.2")
    return ps.compare("peers_ps", CLAIM, parser, variants, bars, argv)


if __name__ == "__main__":
    sys.exit(main())
