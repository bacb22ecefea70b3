# SPDX-License-Identifier: Apache-2.0
"""26 features of a click log: one `EmbeddingCollection` against 26 `SparseEmbeddingBag`.

One process with its server inside. The variants have their own tables and optimizers, and take
turns of a few steps: forward, backward and `optimizer.step()`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fleetlight as fleet
from benchmarks import interleave, report

CLAIM = (
    "26 features of dim 16 in batches of 512: a step with one EmbeddingCollection takes at most "
    "0.75 of the CPU of one with 26 layers."
)
AT_MOST = 0.75
FEATURES, DIM, BATCH = 26, 16, 512
#: different batches, and ids of a feature
BATCHES, IDS = 16, 100_000
LAYERS, AGAIN, COLLECTION, JOINED = "26 layers", "26 layers again", "collection", "concatenated"
Ids = list[Tensor]


class Separate(nn.Module):
    """A layer for each feature."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            fleet.nn.SparseEmbeddingBag(DIM, "sum", table=f"{name} {n}") for n in range(FEATURES)
        )

    def forward(self, ids: Ids) -> Tensor:
        """The features side by side."""
        found = [layer(its) for layer, its in zip(self.layers, ids, strict=True)]
        return torch.cat(found, 1)


class Joint(nn.Module):
    """One layer for all features; it joins them, or the model does."""

    def __init__(self, name: str, *, joined: bool) -> None:
        super().__init__()
        self.names = [str(n) for n in range(FEATURES)]
        features = {n: (DIM, f"{name} {n}", "sum") for n in self.names}
        self.layer = fleet.nn.EmbeddingCollection(features, concatenated=joined)

    def forward(self, ids: Ids) -> Tensor:
        """The features side by side."""
        found: Any = self.layer(dict(zip(self.names, ids, strict=True)))
        return found if isinstance(found, Tensor) else torch.cat(list(found.values()), 1)


def models() -> dict[str, nn.Module]:
    """The model of each variant."""
    return {
        LAYERS: Separate(LAYERS),
        AGAIN: Separate(AGAIN),
        COLLECTION: Joint(COLLECTION, joined=False),
        JOINED: Joint(JOINED, joined=True),
    }


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Ids]
) -> Callable[[], None]:
    """A function that makes one step, each time with the next batch."""
    following, gradient = itertools.cycle(batches), torch.ones(BATCH, FEATURES * DIM)

    def step() -> None:
        optimizer.zero_grad()
        model(next(following)).backward(gradient)
        optimizer.step()

    return step


def batches(each: int, seed: int = 0) -> list[Ids]:
    """Batches with `each` ids in every feature of a sample, most of which repeat."""
    random = np.random.default_rng(seed)
    return [
        [torch.from_numpy(random.zipf(1.1, (BATCH, each)) % IDS) for _ in range(FEATURES)]
        for _ in range(BATCHES)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    torch.set_num_threads(1)
    fleet.init()
    variants = {name: fleet.distributed_model(model) for name, model in models().items()}
    optimizers = {
        name: fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.01))
        for name, model in variants.items()
    }
    fleet.init_worker()
    sections = []
    for each in (1, 5):
        data = batches(each)
        steps = {name: step_of(variants[name], optimizers[name], data) for name in variants}
        interleave.interleave(steps, 1, 1, BATCHES, lambda: None)  # to warm up
        rounds = interleave.interleave(steps, options.rounds, 2, BATCHES, lambda: None)
        sections.append(_section(each, [rounds]))
    fleet.stop_worker()
    report.page("embedding_collection", CLAIM, sections, keep=options.write)
    return 0


def _section(each: int, workers: list[list[dict[str, Any]]]) -> str:
    series = interleave.series(workers)
    base = series[0]
    rows = []
    for one in series:
        share = report.Spread.of([a / b for a, b in zip(one.cpu_ms, base.cpu_ms, strict=True)])
        bar = "-"
        if one.name in (COLLECTION, JOINED):
            bar = f"{AT_MOST}: {'met' if share.median <= AT_MOST else 'missed'}"
        rows.append((one.name, str(report.Spread.of(one.cpu_ms)), str(share), bar))
    head = ("variant", "CPU ms per step: median (min..max)", f"over {base.name}", "at most")
    parts = [
        f"## {each} {'id' if each == 1 else 'ids'} in each feature of a sample",
        report.table(head, rows),
        f"Rounds: {len(base.cpu_ms)}. {report.foreign_line(interleave.foreign(workers))}",
    ]
    return "\n\n".join(parts)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
