# SPDX-License-Identifier: Apache-2.0
"""One large table: it grows by training, is saved during training, and loaded by another job.

One server and one worker create it; two servers and one worker continue with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import jobs, report
from benchmarks.launch_overhead import launcher
from benchmarks.scale_train import DIM, KNOWN, NEW

CLAIM = (
    "A table of 50 million rows (dimension 8, Adagrad) grows on one server by training on ids not "
    "seen before, is saved while training goes on, and is loaded into two servers, where training "
    "goes on. All processes together stay below 10 GiB; a page of a mapped file counts too. The "
    "rows looked at before the save are the same after the load. Beside training a save takes at "
    "most 3 times as long as alone."
)
PROGRAM = str(Path(__file__).parent / "scale_train.py")
CLAIMED_ROWS, CLAIMED_GIB = 50_000_000, 10.0
#: how many times as long as alone a save may take beside training
CLAIMED_TIMES = 3.0
Facts = Mapping[str, Any]


def job(phase: str, servers: int, rows: int, folder: Path) -> jobs.Job:
    """One worker and some servers, started by the launcher."""
    argv = [*launcher(), "--server_num", str(servers), "--worker_num", "1", PROGRAM, phase]
    argv += ["--rows", str(rows), "--folder", str(folder)]
    return jobs.Job(phase, [jobs.Command(argv)], results=1, deadline_s=3600.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run both jobs and write the result page."""
    options = _parse(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name).absolute()
        grow = jobs.run(job("grow", 1, options.rows, folder))
        print(times(options.rows, grow.results[0], None), end="\n\n", flush=True)
        load = jobs.run(job("load", 2, options.rows, folder))
    (made,), (loaded,) = grow.results, load.results
    parts = [times(options.rows, made, loaded), memory(options.rows, made, loaded)]
    parts.append(report.foreign_line([grow.foreign, load.foreign]))
    print("\n\n".join(parts))
    if options.write:
        path = report.write("scale", CLAIM, parts)
        print(f"\nwritten: {path.relative_to(jobs.ROOT)}")
    return 0


def times(rows: int, made: Facts, loaded: Facts | None) -> str:
    """The durations."""
    lines = [
        ("growth, 1 server", f"{made['grown_s']:.1f} s, {_millions(rows, made['grown_s'])}"),
        (f"- a step on {NEW:,} new ids", _steps(made["new"])),
        (f"- then a step on {KNOWN:,} known ids", _steps(made["quiet"])),
        ("save, alone", _speed(made["bytes"], made["alone_s"])),
        ("save, beside training", _speed(made["bytes"], made["saved_s"])),
        ("- times as long as alone", beside_alone(rows, made)),
        ("- the call that begins it", f"{1e3 * made['call_s']:.0f} ms"),
        ("- a step meanwhile", _steps(made["beside"])),
        ("- longest pause of training", f"{pause_ms(made):.0f} ms"),
    ]
    if loaded is not None:
        lines += [
            ("load, 2 servers", _speed(made["bytes"], loaded["loaded_s"])),
            (f"- then a step on {KNOWN:,} known ids", _steps(loaded["quiet"])),
        ]
    return f"## {rows:,} rows of dimension {DIM}, Adagrad\n\n" + report.table(("what", ""), lines)


def memory(rows: int, made: Facts, loaded: Facts) -> str:
    """The most each process held, and what they come to together."""
    lines = [
        ("1 server, after the growth", _mib(made["grown_mib"]), ""),
        ("1 server, growth and save", _mib(made["servers_mib"]), ""),
        ("its worker", _mib([made["worker_mib"]]), ""),
        ("together", _mib([together_mib(made)]), verdict(rows, together_mib(made))),
        ("2 servers, after the load", _mib(loaded["loaded_mib"]), ""),
        ("2 servers, load and training", _mib(loaded["servers_mib"]), ""),
        ("- of it their own, without mapped files", _mib(loaded["own_mib"]), ""),
        ("their worker", _mib([loaded["worker_mib"]]), ""),
        ("together", _mib([together_mib(loaded)]), verdict(rows, together_mib(loaded))),
    ]
    head = ("peak memory", "MiB of each", f"at most {CLAIMED_GIB:g} GiB")
    return f"## Memory\n\n{report.table(head, lines)}"


def beside_alone(rows: int, made: Facts) -> str:
    """How many times as long as alone a save takes; of the claimed size, whether that is met."""
    times = made["saved_s"] / made["alone_s"]
    if rows != CLAIMED_ROWS:
        return f"{times:.2f}"
    return (
        f"{times:.2f}, at most {CLAIMED_TIMES:g}: {'met' if times <= CLAIMED_TIMES else 'missed'}"
    )


def pause_ms(made: Facts) -> float:
    """The longest time between two steps, or within one, because of the save."""
    return float(max(1e3 * made["call_s"], made["beside"]["longest_ms"]))


def together_mib(facts: Facts) -> float:
    """The peaks of all processes, as if they came at once."""
    return float(facts["worker_mib"] + sum(facts["servers_mib"]))


def verdict(rows: int, mib: float) -> str:
    """Whether the claim holds; of other sizes it says nothing."""
    if rows != CLAIMED_ROWS:
        return "-"
    return "met" if mib <= 1024 * CLAIMED_GIB else "missed"


def _steps(of: Mapping[str, float]) -> str:
    return (
        f"{of['median_ms']:.1f} ms, longest {of['longest_ms']:.0f} ms, of {of['steps']:,.0f} steps"
    )


def _speed(size: int, seconds: float) -> str:
    return f"{seconds:.1f} s for {size / 1e9:.2f} GB, {size / 1e9 / seconds:.2f} GB/s"


def _millions(rows: int, seconds: float) -> str:
    return f"{rows / 1e6 / seconds:.2f} M rows/s"


def _mib(values: Sequence[float]) -> str:
    return ", ".join(f"{value:,.0f}" for value in values)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=CLAIMED_ROWS)
    parser.add_argument(
        "--folder", help="on the disk to save to (default: that of temporary files)"
    )
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
