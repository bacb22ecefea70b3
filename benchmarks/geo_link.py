# SPDX-License-Identifier: Apache-2.0
"""GeoSGD against async on a slow network: word2vec over a link of 200 Mbit/s.

Servers and workers run in two network namespaces; the link between them is shaped in both
directions. That requires root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks import harness, jobs, report
from benchmarks.ps_jobs import WARMUP, Bar, Make, Ours, add_usual_options, section
from benchmarks.ps_models import TITLES

CLAIM = (
    "Where the link between workers and servers is narrow, GeoSGD that exchanges every 100 or 400 "
    "steps trains at least 3 times as many examples per second as async: word2vec, 2 servers and "
    "2 workers, 200 Mbit/s between their network namespaces in each direction. An exchange after "
    "few steps brings nothing: the small k are shown too."
)
MODEL = "word2vec"
#: (servers, workers)
SIDES = (("fleet-servers", "10.203.0.1"), ("fleet-workers", "10.203.0.2"))
AT_LEAST = {100: 3.0, 400: 3.0}
#: untimed: during these steps a worker pulls many words for the first time
WARM = 400
#: a run has at least this number of exchanges, since the last one does not overlap
EXCHANGES = 16
# twice what a link of that speed carries in a millisecond of the slowest kernel clock
BURST = "256kb"


class LinkError(Exception):
    """The two namespaces could not be created."""


@contextlib.contextmanager
def link(mbit: float) -> Iterator[None]:
    """Inside the block, two namespaces with a shaped link exist."""
    _check()
    pair = [f"fleet-v{side}" for side in range(2)]
    try:
        for (space, _), _ in zip(SIDES, pair, strict=True):
            _run("ip", "netns", "add", space)
        _run("ip", "link", "add", pair[0], "type", "veth", "peer", "name", pair[1])
        for (space, address), end in zip(SIDES, pair, strict=True):
            _run("ip", "link", "set", end, "netns", space)
            within = ("ip", "-n", space)
            _run(*within, "addr", "add", f"{address}/24", "dev", end)
            _run(*within, "link", "set", "lo", "up")
            _run(*within, "link", "set", end, "up")
            shape = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", BURST, "latency", "100ms")
            _run("tc", "-n", space, "qdisc", "add", "dev", end, *shape)
        yield
    finally:
        # deleting a namespace deletes its end of the link
        for space, _ in SIDES:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", pair[0]], capture_output=True, check=False)


def _check() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"{' and '.join(missing)} not found; install iproute2 to shape a link")
    if os.geteuid() != 0:
        raise LinkError("got an ordinary user, expected root: network namespaces need it")
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    taken = {line.split()[0] for line in found.stdout.splitlines() if line.strip()}
    if left := taken & {space for space, _ in SIDES}:
        names = ", ".join(sorted(left))
        raise LinkError(
            f"{names} exist: another run is in progress, or has left them: ip netns del {names}"
        )


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")


def variants(k_steps: Sequence[int], steps: dict[str, int]) -> dict[str, Make]:
    """Async, and GeoSGD for each k."""
    around = tuple(["ip", "netns", "exec", space] for space, _ in SIDES)
    host = SIDES[0][1]

    def ours(name: str, mode: str, count: int, k: int) -> Make:
        return Ours(
            name,
            MODEL,
            mode,
            count,
            servers=2,
            k_steps=k,
            warmup=WARM,
            around=(around[0], around[1]),
            host=host,
        ).job

    made = {"async": ours("async", "async", steps["async"], 100)}
    geo = {
        name_of(k): ours(name_of(k), "geo", max(steps["geo"], EXCHANGES * k), k) for k in k_steps
    }
    return made | geo


def name_of(k: int) -> str:
    """The name of GeoSGD with this k."""
    return f"geo, k={k}"


def main(argv: Sequence[str] | None = None) -> int:
    """Shape the link, measure, write the result page."""
    options = _parse(argv)
    steps = {"async": options.async_steps, "geo": options.steps}
    if options.prime:
        # kernels are compiled once and then loaded from files
        for mode in ("async", "geo"):
            jobs.run(Ours("prime", MODEL, mode, WARMUP).job())
    with link(options.mbit):
        make = variants(options.k_steps, steps)
        runs = harness.rounds(make, options.rounds, options.idle_s, attempts=2)
    bars = [Bar(name_of(k), "async", AT_LEAST.get(k)) for k in options.k_steps]
    title = f"{TITLES[MODEL]}, {options.mbit:g} Mbit/s between 2 servers and 2 workers"
    parts = [section(title, runs, bars, harness.foreign(runs)), _loses(runs, options.k_steps)]
    print("\n\n".join(parts))
    if options.write:
        path = report.write("geo_link", CLAIM, parts)
        print(f"\nwritten: {path.relative_to(jobs.ROOT)}")
    return 0


def _loses(runs: dict[str, list[jobs.Run]], k_steps: Sequence[int]) -> str:
    """A sentence about the k at which an exchange costs more than it saves."""
    rates = {name: report.Spread.of([_rate(run) for run in of]).median for name, of in runs.items()}
    slower = [k for k in k_steps if rates[name_of(k)] < rates["async"]]
    if not slower:
        return "GeoSGD was faster than async at every k shown."
    return f"GeoSGD was slower than async at k = {', '.join(map(str, sorted(slower)))}."


def _rate(run: jobs.Run) -> float:
    return float(sum(r["examples"] / r["seconds"] for r in run.results))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=200.0, help="of the link, in each direction")
    parser.add_argument("--k_steps", type=int, nargs="+", default=[1, 2, 5, 20, 100, 400])
    parser.add_argument(
        "--steps", type=int, default=400, help="timed steps of GeoSGD's workers, at least"
    )
    parser.add_argument("--async_steps", type=int, default=300, help="timed steps of async ones")
    add_usual_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
