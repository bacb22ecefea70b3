# SPDX-License-Identifier: Apache-2.0
"""What figures and an open page cost: one job with both, which are off in every other turn.

`--page LOGDIR` is the process of the page, with a client that reads its stream as a browser does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import machine, report, turns
from benchmarks.figures_switch import FiguresSwitch
from benchmarks.jobs import Command, Job
from benchmarks.ps_jobs import Ours

CLAIM = (
    "Wide & deep in async mode, 2 servers and 2 workers: all figures and the open live page take "
    "at most 1 % of the CPU seconds that the job has, and a job with them makes at least 0.99 of "
    "the steps per second. It is one job, whose figures and page are off in every other turn. It "
    "counts in both kinds of turns: 14 changes of the part of a step, of 0.4 us each."
)
WITH, WITHOUT = "figures and page", "neither"
AT_LEAST, AT_MOST = 0.99, 0.01
_ENDLESS = 10_000_000
_SWITCH = "figures.switch"


def job(folder: Path) -> Job:
    """The job: its processes record figures in the folder, and a page is open."""
    switch = folder / _SWITCH
    made = Ours(WITH, "wide_deep", "async", _ENDLESS, servers=2, count=True).job()
    log = {"FLEET_LOG_DIR": str(folder)}
    commands = [
        Command([*one.argv, "--figures_switch", str(switch)], {**one.environment, **log})
        for one in made.commands
    ]
    page = [sys.executable, "-m", "benchmarks.figures_cost", "--page", str(folder)]
    return dataclasses.replace(made, commands=[*commands, Command(page)])


def serve_page(folder: Path) -> None:
    """Serve the page of a log folder, and read its stream."""
    from fleetlight.dashboard.server import serve
    from fleetlight.launch.processes.followers import dashboard

    FiguresSwitch(folder / _SWITCH).install_in_page()
    listener, token = dashboard.listen(0), "benchmark"
    url = dashboard.link(listener, token).replace("/?", "/feed?")
    reader = threading.Thread(target=_read, args=(url,), daemon=True)
    serve(folder, listener, token, reader.start)


def _read(url: str) -> None:
    with urllib.request.urlopen(url) as stream:
        for _ in stream:
            pass


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    if options.page is not None:
        serve_page(options.page)
        return 0
    report.page("figures_cost", CLAIM, _sections(options), keep=options.write)
    return 0


def _sections(options: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        switch = FiguresSwitch(folder / _SWITCH)
        sides = {
            WITH: functools.partial(switch.turn, on=True),
            WITHOUT: functools.partial(switch.turn, on=False),
        }
        series, foreign = turns.take_switched(
            job(folder), sides, options.rounds, options.turns, options.turn_s
        )
        on_s = options.rounds * options.turns * (options.turn_s + turns.SETTLE_S)
        yield shares(switch.spent_s(), on_s)
        ratio = report.Ratio(series[0], series[1], AT_LEAST)
        yield report.section("wide & deep: async", series, [ratio], foreign)


def shares(spent_s: Sequence[float], on_s: float) -> str:
    """The CPU seconds of figures, by process, as shares of those that there are."""
    *recorders, page = sorted(spent_s)
    share = sum(spent_s) / (on_s * (cores := machine.cores()))
    verdict = "met" if share <= AT_MOST else "missed"
    rows = [
        ("recording, the process with the most", f"{1e3 * max(recorders) / on_s:.2f}", "-"),
        ("recording, all processes", f"{1e3 * sum(recorders) / on_s:.2f}", "-"),
        ("the page's server, and the reader of its stream", f"{1e3 * page / on_s:.2f}", "-"),
        (
            f"all, as a share of {cores} cores",
            f"{1e3 * sum(spent_s) / on_s:.2f}",
            f"{share:.2%}; at most {AT_MOST:.0%}: {verdict}",
        ),
    ]
    head = ("what", "CPU ms a second", "share")
    return "## CPU time of figures\n\n" + report.table(head, rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turns", type=int, default=12, help="of each kind in a round")
    parser.add_argument("--turn_s", type=float, default=2.0)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
