# SPDX-License-Identifier: Apache-2.0
"""Parameter servers on two cores against plain torch on one: wide & deep, and word2vec.

One server and two workers share two cores; plain torch (`nn.EmbeddingBag(sparse=True)`) has one
core to itself and no server to talk to. Queues are drained before the clock stops.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import interleave, machine, ps
from benchmarks.ps import MODES, Bar, Make, Ours, one_process

CLAIM = (
    "One server and two workers on two cores train more examples per second than plain one-process "
    "torch on one core, which sends nothing anywhere: wide & deep 1.25 times in sync, 1.4 in "
    "async, 1.6 in geo; word2vec as many in async, 1.5 times in geo. Rows are pulled ahead, or the "
    "server is in the same process: at least 0.9 times. A job's examples per CPU second are at "
    "least 0.85 times those of our own one process. All queues are drained inside the timed part."
)
TORCH, ALONE, AHEAD = "torch, one core", "one process", "sync, 1 worker, look-ahead"
AT_LEAST = {
    "wide_deep": {"sync": 1.25, "async": 1.4, "geo": 1.6},
    "word2vec": {"async": 1.0, "geo": 1.5},
}
NEAR, THRIFT = 0.9, 0.85


def variants(model: str, steps: int, _: argparse.Namespace) -> dict[str, Make]:
    """What makes a fresh job of each."""
    own_core = machine.cores() > 1
    ahead = Ours(AHEAD, model, "sync", steps, 1, 1, flags=["--lookahead"], own_core=own_core)
    return {
        TORCH: one_process(TORCH, "torch", model, steps),
        ALONE: one_process(ALONE, "fleetlight", model, steps),
        AHEAD: ahead.job,
        **{mode: Ours(mode, model, mode, steps).job for mode in MODES},
    }


def bars(model: str) -> list[Bar]:
    """What is compared, and the least it may be."""
    speeds = [Bar(mode, TORCH, AT_LEAST[model].get(mode)) for mode in MODES]
    near = [Bar(ALONE, TORCH, NEAR), Bar(AHEAD, TORCH, NEAR)]
    return speeds + near + [Bar(mode, ALONE, THRIFT, "thrift") for mode in MODES]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both models and write the result page."""
    return ps.compare("ps_modes", CLAIM, interleave.parser(__doc__, 5), variants, bars, argv)


if __name__ == "__main__":
    sys.exit(main())
