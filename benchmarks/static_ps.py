# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: a static program against the eager loop, in every mode.

One server and two workers, and one process with the server in it; the kinds in turns. A program
makes one step a call, or several.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import interleave, ps
from benchmarks.ps import MODES, Bar, Make, Ours, one_process

CLAIM = (
    "With parameter servers, a static program trains at least as many examples per second as the "
    "eager loop: wide & deep in sync, async and geo, and in one process. With 10 steps a call it "
    "trains 1.3 times as many per CPU second."
)
ALONE = "one process"
KINDS = {"eager": "fleetlight", "static": "static"}
#: with so many steps a call: the least in examples per CPU second
STEPS_PER_CALL, SEVERAL_AT_LEAST = 10, 1.3
SEVERAL = f"static, {STEPS_PER_CALL} steps a call"


def variants(model: str, steps: int, _: argparse.Namespace) -> dict[str, Make]:
    """What makes a fresh job of each."""
    made: dict[str, Make] = {}
    for kind, system in KINDS.items():
        made[f"{ALONE}, {kind}"] = one_process(f"{ALONE}, {kind}", system, model, steps)
        for mode in MODES:
            name = f"{mode}, {kind}"
            made[name] = Ours(name, model, mode, steps, flags=["--system", system]).job
    flags = ["--system", "static", "--steps_per_call", str(STEPS_PER_CALL)]
    for mode in MODES:
        name = f"{mode}, {SEVERAL}"
        made[name] = Ours(name, model, mode, steps, flags=flags).job
    return made


def bars(model: str) -> list[Bar]:
    """What is compared, and the least it may be; for word2vec nothing was promised."""
    least = 1.0 if model == "wide_deep" else None
    pairs = [(f"{mode}, static", f"{mode}, eager") for mode in (*MODES, ALONE)]
    found = [Bar(*pair, least) for pair in pairs] + [Bar(*pair, None, "thrift") for pair in pairs]
    several = [Bar(f"{m}, {SEVERAL}", f"{m}, eager", SEVERAL_AT_LEAST, "thrift") for m in MODES]
    return found + several


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the result page."""
    return ps.compare("static_ps", CLAIM, interleave.parser(__doc__, 7), variants, bars, argv)


if __name__ == "__main__":
    sys.exit(main())
