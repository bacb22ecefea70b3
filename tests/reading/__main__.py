# SPDX-License-Identifier: Apache-2.0
"""What a reader opens: the functions and files of Fleetlight that real paths call.

A function counts once, in all threads and processes of a path; lambdas, comprehensions and bodies
of classes do not count. Each path is also written to log/reading/PATH.txt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.reading import ceilings
from tests.reading.jobs import JOBS, Starter
from tests.reading.paths import FAST, PATHS, number
from tests.reading.trace import Trace, by_package, table

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fleetlight"
LISTINGS = ROOT / "log" / "reading"


def main(argv: Sequence[str] | None = None) -> int:
    """Trace, print, and compare with the ceilings or lower them."""
    options = _parse(argv)
    traces = trace(options.paths or list(PATHS))
    LISTINGS.mkdir(parents=True, exist_ok=True)
    for name, path in traces.items():
        lines = [f"{name}: {PATHS[name].about}", by_package(path), *path.listing()]
        (LISTINGS / f"{name}.txt").write_text("\n".join(lines) + "\n")
        if options.verbose:
            print(*lines, sep="\n", end="\n\n")
    print(*table(traces), sep="\n")
    budget = ceilings.BUDGET.read_text() if ceilings.BUDGET.exists() else ""
    if options.lower:
        ceilings.BUDGET.write_text(ceilings.lowered(budget, traces))
    problems = list(ceilings.exceeded(traces, ceilings.read(budget))) if options.check else []
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def trace(names: Sequence[str]) -> dict[str, Trace]:
    """Run the jobs of these paths, and read what they called."""
    needed = {*names, *(PATHS[name].over for name in names if PATHS[name].over)}
    jobs = dict.fromkeys(path.job for name, path in PATHS.items() if name in needed)
    with tempfile.TemporaryDirectory(prefix="fleetlight-reading-") as folder:
        for job in jobs:
            JOBS[job](Starter(Path(folder, job), PACKAGE))
        found = {
            name: Trace.read(Path(folder, path.job), number(name))
            for name, path in PATHS.items()
            if path.job in jobs and not path.over
        }
    for name in needed:
        if not PATHS[name].over and not found[name].functions:
            raise SystemExit(f"{name} called no function of {PACKAGE}: was its window opened?")
    for name, path in PATHS.items():
        if path.over and name in needed:
            found[name] = found["step_log"].without(found[path.over])
    return {name: found[name] for name in PATHS if name in names}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:<22}{path.about}" for name, path in PATHS.items()),
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a path below, or fast; all")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what each path opens")
    parser.add_argument("--check", action="store_true", help="fail above a ceiling of budget.toml")
    parser.add_argument("--lower", action="store_true", help="write lower numbers to budget.toml")
    options = parser.parse_args(argv)
    if "fast" in options.paths:
        options.paths.remove("fast")
        options.paths += [name for name, path in PATHS.items() if path.job in FAST]
    if unknown := sorted({*options.paths} - {*PATHS}):
        parser.error(f"no path {', '.join(unknown)}; the paths: {', '.join(PATHS)}, and fast")
    return options


if __name__ == "__main__":
    sys.exit(main())
