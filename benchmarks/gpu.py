# SPDX-License-Identifier: Apache-2.0
"""A GPU: copies and sums of rows, and models on it with rows on a server.

The server is inside the process of the worker. Without a GPU it says so and ends; `--device cpu`
runs everything else, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

import fleetlight as fleet
from benchmarks import interleave, report
from benchmarks.ps import MODELS, TITLES, Bags, batches_of, sgd, stepper
from fleetlight.ps.layers.device_rows import gathered
from fleetlight.ps.layers.staging import staging_of

CLAIM = (
    "On a GPU, gathers and sums of rows reach half the bandwidth of a copy on it, copies through "
    "pinned memory are faster than plain ones, and a model on the GPU with rows on a server makes "
    "at least as many steps per second as in main memory."
)
#: of the bandwidth of a copy on the device
AT_LEAST_OF_COPY = 0.5
TORCH, SERVED, IN_MEMORY = "plain torch", "rows on a server", "rows on a server, model on the CPU"
#: rows, and distinct rows that they repeat
ROWS, DISTINCT, DIM = 1_000_000, 250_000, 64


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the result page."""
    parser = report.parser(__doc__, rounds=9)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"benchmarks.gpu: torch {torch.__version__} sees no GPU; nothing was measured")
        return 0
    return report.page("gpu", CLAIM, _sections(options), options.quick)


def _sections(options: argparse.Namespace) -> Iterator[str]:
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    yield _bandwidths(device, 1000 if options.quick else ROWS)
    yield from _served(device, options)


# -- copies and sums


def _bandwidths(device: torch.device, rows: int) -> str:
    """GB per second of each copy or sum, bytes read and bytes written."""
    random = np.random.default_rng(0)
    distinct = max(1, rows * DISTINCT // ROWS)
    places = random.integers(0, distinct, rows).astype(np.int32)
    array = random.random((distinct, DIM), np.float32)
    table, large = torch.from_numpy(array).to(device), torch.zeros(rows, DIM, device=device)
    there, copies = torch.from_numpy(places).to(device), staging_of(device)
    each, few = large.numel() * 4, table.numel() * 4
    index, read = places.nbytes, places.nbytes + 2 * each
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "copy on the device": (2 * each, large.clone),
        "gather": (read, lambda: table.index_select(0, there)),
        "gather, index copied first": (read, lambda: gathered(table, places)),
        "sum": (
            each + index + 2 * few,
            lambda: torch.zeros_like(table).index_add_(0, there, large),
        ),
        "main memory to the device, pinned": (few, lambda: copies.to_device(array)),
        "main memory to the device, plain": (few, lambda: torch.from_numpy(array).to(device)),
        "device to main memory, pinned": (few, lambda: copies.to_host(table)()),
        "device to main memory, plain": (few, table.cpu),
    }
    found = {name: _gb_per_s(device, size, call) for name, (size, call) in work.items()}
    copy = found["copy on the device"].median
    lines = [(name, str(one), f"{one.median / copy:.2f}") for name, one in found.items()]
    head = ("work", "GB/s: median (min..max)", "of a copy")
    title = f"## {rows:,} rows of {DIM} from {distinct:,} distinct ones, on {_name(device)}"
    least = min(found[name].median for name in ("gather", "sum")) / copy
    verdict = f"Of a copy at least {report.at_least(least, AT_LEAST_OF_COPY)}."
    return "\n\n".join([title, report.table(head, lines), verdict])


def _gb_per_s(device: torch.device, size: int, call: Callable[[], object]) -> report.Spread:
    rates = []
    for _ in range(12):
        _finish(device)
        start = time.perf_counter()
        for _ in range(5):
            call()
        _finish(device)
        rates.append(5 * size / 1e9 / (time.perf_counter() - start))
    # the first ones allocate memory
    return report.Spread.of(rates[2:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


# -- models with rows on a server


def _served(device: torch.device, options: argparse.Namespace) -> Iterator[str]:
    """Each model in three places, trained in turns."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fleet.init()
    models = {name: _variants(name, device) for name in options.models}
    fleet.init_worker()
    for name, variants in models.items():
        batches, steps = (2, 2) if options.quick else (100, 50)
        plays = {
            one: interleave.stepping(_step(*made, name, batches), steps, lambda: _finish(device))
            for one, made in variants.items()
        }
        interleave.interleave(plays, 1, 1)  # to warm up
        rounds = interleave.interleave(plays, 1 if options.quick else options.rounds, 2)
        series = {one.name: one for one in interleave.series([rounds])}
        ratios = [
            report.Ratio(series[SERVED], series[IN_MEMORY], 1.0),
            report.Ratio(series[SERVED], series[TORCH]),
        ]
        foreign = interleave.foreign([rounds])
        yield report.section(TITLES[name], list(series.values()), ratios, foreign)
    fleet.stop_worker()


Made = tuple[nn.Module, torch.optim.Optimizer, torch.device]


def _variants(name: str, device: torch.device) -> dict[str, Made]:
    plain = MODELS[name](Bags).to(device)
    made: dict[str, Made] = {TORCH: (plain, sgd(plain), device)}
    for variant, place in ((SERVED, device), (IN_MEMORY, torch.device("cpu"))):
        model = MODELS[name](lambda rows, dim: fleet.nn.SparseEmbedding(dim)).to(place)
        model = fleet.distributed_model(model)
        made[variant] = model, fleet.distributed_optimizer(sgd(model)), place
    return made


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, name: str, count: int
) -> Callable[[], float]:
    """A step with the next batch; only plain torch needs ids on the device."""
    batches = itertools.cycle(batches_of(name, 0, count))
    moves_ids = any(isinstance(layer, nn.EmbeddingBag) for layer in model.modules())
    step = stepper(model, optimizer)

    def next_step() -> float:
        of = next(batches)
        return step(
            *(one.to(device) if moves_ids or one.is_floating_point() else one for one in of)
        )

    return next_step


if __name__ == "__main__":
    sys.exit(main())
