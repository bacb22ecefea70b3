# SPDX-License-Identifier: Apache-2.0
"""GeoSGD against async on a slow network: word2vec over a link of 200 Mbit/s.

Servers and workers run on two hosts made of network namespaces, whose links are shaped in both
directions. That requires root, `ip` and `tc`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rig.hosts import hosts

from benchmarks import interleave, jobs, ps, report
from benchmarks.ps import TITLES, WARMUP, Bar, Make, Ours

CLAIM = (
    "Where the link between workers and servers is narrow, GeoSGD that exchanges every 100 or 400 "
    "steps trains at least 3 times as many examples per second as async: word2vec, 2 servers and "
    "2 workers, 200 Mbit/s between their network namespaces in each direction. An exchange after "
    "few steps brings nothing: the small k are shown too."
)
MODEL = "word2vec"
AT_LEAST = {100: 3.0, 400: 3.0}
#: untimed: during these steps a worker pulls many words for the first time
WARM = 400
#: a run has at least this number of exchanges, since the last one does not overlap
EXCHANGES = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Shape the link, measure, write the result page."""
    parser = interleave.parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--mbit", type=float, default=200.0, help="of the link, in each direction")
    add("--k_steps", type=int, nargs="+", default=[1, 2, 5, 20, 100, 400])
    add("--steps", type=int, default=400, help="timed steps of GeoSGD's workers, at least")
    add("--async_steps", type=int, default=300, help="timed steps of async ones")
    options = parser.parse_args(argv)

    def sections() -> Iterator[str]:
        # kernels are compiled once and then loaded from files
        for mode in ("async", "geo") if not options.quick else ():
            jobs.run(Ours("prime", MODEL, mode, WARMUP).job())
        with hosts(2, rate=f"{options.mbit:g}mbit") as rig:

            def ours(name: str, mode: str, steps: int, k: int) -> Make:
                steps, warmup = (5, 5) if options.quick else (steps, WARM)
                flags = ["--k_steps", str(k)]
                around = rig.hosts[0].prefix, rig.hosts[1].prefix
                at = rig.addresses[0]
                return Ours(name, MODEL, mode, steps, 2, 2, flags, warmup, around, at).job

            make = {"async": ours("async", "async", options.async_steps, 100)}
            for k in options.k_steps:
                steps = max(options.steps, EXCHANGES * k)
                make[f"geo, k={k}"] = ours(f"geo, k={k}", "geo", steps, k)
            runs = interleave.run_jobs(make, 1 if options.quick else options.rounds, options.idle_s)
        bars = [Bar(f"geo, k={k}", "async", AT_LEAST.get(k)) for k in options.k_steps]
        title = f"{TITLES[MODEL]}, {options.mbit:g} Mbit/s between 2 servers and 2 workers"
        yield ps.section(title, runs, bars)
        rates = {n: report.Spread.of(map(ps.rate, of)).median for n, of in runs.items()}
        slower = [k for k in sorted(options.k_steps) if rates[f"geo, k={k}"] < rates["async"]]
        known = f"k = {', '.join(map(str, slower))}" if slower else "no k shown"
        yield f"GeoSGD was slower than async at {known}."

    return report.page("geo_link", CLAIM, sections(), options.quick)


if __name__ == "__main__":
    sys.exit(main())
