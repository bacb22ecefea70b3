# SPDX-License-Identifier: Apache-2.0
"""The downtime of a killed server, and the cost of a snapshot for training.

One server has a table of some million rows (dimension 8, Adagrad). One worker trains on it with
durability='log' and kills it repeatedly; the rows are compared each time. It also measures how soon
a job ends after a worker is killed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import interleave, jobs, machine, report

CLAIM = (
    "A server of 5 million rows that is killed answers again within 5 s, from its snapshot and "
    "its log, and every row is as it was. While a snapshot is written, training keeps at least "
    "0.9 of its speed, and no pull fails. A worker's death is noticed within 5 s."
)
PROGRAM = str(Path(__file__).parent / "recovery_train.py")
AWAY_S, NOTICED_S, BESIDE = 5.0, 5.0, 0.9
CLAIMED_ROWS = 5_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = interleave.parser(__doc__, rounds=10)
    add = parser.add_argument
    add("--rows", type=int, default=CLAIMED_ROWS)
    add("--deaths", type=int, default=5)
    add("--snapshot_s", type=float, default=20.0)
    add("--tail_s", type=float, default=10.0, help="of training before a kill")
    add("--quiet_s", type=float, default=240.0, help="of timed steps")
    options = parser.parse_args(argv)
    if options.quick:
        options.rows, options.rounds, options.deaths, options.snapshot_s = 20_000, 1, 1, 2.0
        options.tail_s, options.quiet_s = 1.0, 6.0
    machine.wait_until_idle(options.idle_s)
    return report.page("recovery", CLAIM, _sections(options), options.quick)


def _sections(options: argparse.Namespace) -> Iterator[str]:
    flags = ["--server_num", "1", "--worker_num", "1", "--max_restarts", str(options.rounds)]
    facts = ["--rows", str(options.rows), "--kills", str(options.rounds)]
    facts += ["--snapshot_s", str(options.snapshot_s), "--tail_s", str(options.tail_s)]
    facts += ["--quiet_s", str(options.quiet_s)]
    command = jobs.Command([*jobs.launcher(), *flags, PROGRAM, "kill", *facts])
    run = jobs.run(jobs.Job("kill", [command], results=1, deadline_s=3600.0))
    yield killed(options.rows, run.results[0], run.foreign)
    yield noticed([_noticed_s() for _ in range(options.deaths)])


def killed(rows: int, found: Mapping[str, Any], foreign: float | None) -> str:
    """The costs of kills and snapshots."""
    away = report.Spread.of(one["away_s"] for one in found["kills"])
    log = report.Spread.of(one["log_mib"] for one in found["kills"])
    lines = [
        ("kills, each row compared", str(len(found["kills"])), "-"),
        ("s until the rows were read again", str(away), _verdict(rows, away.median <= AWAY_S)),
        ("- MiB of log read back", str(log), "-"),
        ("steps while nothing was written", _steps(found["stretches"][::2]), "-"),
        ("steps beside a snapshot", _steps(found["stretches"][1::2]), "-"),
    ]
    if shares := beside(found["stretches"]):
        share = report.Spread.of(shares)
        verdict = _verdict(rows, share.median >= BESIDE)
        lines.append((f"- of the speed around it, {len(shares)} snapshots", str(share), verdict))
    head = ("what", "median (min..max)", "claim")
    table = report.table(head, lines)
    return f"## {rows:,} rows, one server\n\n{table}\n\n{report.foreign_line([foreign])}"


def beside(stretches: Sequence[Sequence[float]]) -> list[float]:
    """The speed beside each snapshot, of that in the stretches before and behind it together."""
    mean = statistics.fmean
    # what the last stretch was cut off by is no end of a snapshot
    return [
        mean([*stretches[n - 1], *stretches[n + 1]]) / mean(stretches[n])
        for n in range(1, len(stretches) - 1, 2)
    ]


def noticed(seconds: Sequence[float]) -> str:
    """How soon a job of two workers ends after one is killed."""
    spread = report.Spread.of(seconds)
    line = ("s until fleetrun had ended all", str(spread), report.at_most(spread.high, NOTICED_S))
    return f"## A worker dies, {len(seconds)} times\n\n" + report.table(
        ("what", "median (min..max)", "claim"), [line]
    )


def _noticed_s() -> float:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--server_num", "1", "--worker_num", "2"]
        subprocess.run(
            [*jobs.launcher(), *flags, PROGRAM, "lose"],
            cwd=folder,
            env=jobs.environment({}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=300,
            check=False,
        )
        return time.time() - float((Path(folder) / "died").read_text())


def _steps(stretches: Sequence[Sequence[float]]) -> str:
    of = [1e3 * one for seconds in stretches for one in seconds]
    if not of:
        return "none"
    return f"{statistics.fmean(of):.1f} ms on average, longest {max(of):.0f} ms, of {len(of):,}"


def _verdict(rows: int, reached: bool) -> str:
    """Of other sizes the claim says nothing."""
    return "-" if rows != CLAIMED_ROWS else "met" if reached else "missed"


if __name__ == "__main__":
    sys.exit(main())
