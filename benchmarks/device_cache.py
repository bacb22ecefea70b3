# SPDX-License-Identifier: Apache-2.0
"""`cache="device"`: which share of the rows stays on the device, and what that does to the speed.

One process with its server inside, for each model and each way to train. The two variants have
their own tables, read the same batches, and take turns of a few steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fleetlight as fleet
from benchmarks import forked, interleave, report
from benchmarks.peers import ps_timed
from benchmarks.ps_models import MODELS, TITLES
from benchmarks.ps_train import Batch
from fleetlight.fleet.job import current
from fleetlight.fleet.served.job import ServedJob
from fleetlight.ps.layers.embedding import SparseEmbedding

CLAIM = (
    "A cache saves a row that is read more often than it changes, or whose age has a bound; with "
    "one batch in each sync step it saves nothing, since each step changes the rows that it reads."
)
CACHED, PLAIN = "with a cache", "without"
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Usage:
    """A way to train."""

    title: str
    #: batches in each step
    micro: int = 1
    #: False: only the dense parameters learn
    trains_rows: bool = True
    strategy: Mapping[str, Any] = dataclasses.field(default_factory=dict)


USAGES = {
    "one": Usage("sync, one batch in each step"),
    "four": Usage("sync, four batches in each step", micro=4),
    "fixed": Usage("sync, rows that do not learn", trains_rows=False),
    "staleness": Usage(
        "async, a staleness of 4",
        strategy={"a_sync": True, "a_sync_configs": {"staleness": 4}},
    ),
}


def sections(options: argparse.Namespace) -> Iterator[str]:
    """A section for each model; `options` are those of this program."""
    forked.preload()
    for model in options.models:
        runs = {}
        for name in USAGES:
            given = {name: getattr(options, name) for name in ("device", "rounds", "steps")}
            given |= {"model": model, "usage": name, "batches": options.batches}
            [runs[name]] = forked.run_as(f"{model}, {name}", measured, given, [{}]).results
        yield _section(model, runs)


def _section(model: str, runs: Mapping[str, Any]) -> str:
    lines = []
    for name, found in runs.items():
        series = {one.name: one for one in interleave.series([found["rounds"]])}
        both = zip(series[CACHED].rates, series[PLAIN].rates, strict=True)
        ratio = report.Spread.of([one / other for one, other in both])
        examples = USAGES[name].micro * ps_timed.BATCH
        rates = [examples * report.Spread.of(series[one].rates).median for one in (PLAIN, CACHED)]
        rows = found["found"] + found["pulled"]
        lines.append(
            (
                USAGES[name].title,
                f"{rows / found['steps']:,.0f}",
                f"{found['pulled'] / found['steps']:,.0f}",
                f"{found['found'] / rows:.0%}",
                *(f"{rate:,.0f}" for rate in rates),
                str(ratio),
            )
        )
    head = (
        "training",
        "distinct rows of a step",
        "pulled and copied with a cache",
        "found on the device",
        "examples/s without",
        "with",
        "ratio: median (min..max)",
    )
    shares = [interleave.foreign([one["rounds"]]) for one in runs.values()]
    foreign = report.foreign_line([share for some in shares for share in some])
    return f"## {TITLES[model]}\n\n{report.table(head, lines)}\n\n{foreign}"


def measured(options: Mapping[str, Any]) -> dict[str, Any]:
    """Train both variants in turns; count the rows after a warm-up."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    usage, device = USAGES[options["usage"]], torch.device(options["device"])
    fleet.init()
    variants = {one: _variant(options["model"], usage, one, device) for one in (PLAIN, CACHED)}
    fleet.init_worker()
    data = [
        tuple(torch.from_numpy(array) for array in batch)
        for batch in ps_timed.batches(options["model"], 0, options["batches"])
    ]
    steps = {one: _step(*made, data, usage, device) for one, made in variants.items()}

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    interleave.interleave(steps, 1, WARM_UP, options["steps"], finish)
    before = _counts()
    rounds = interleave.interleave(steps, options["rounds"], 2, options["steps"], finish)
    found, pulled = (after - start for start, after in zip(before, _counts(), strict=True))
    fleet.stop_worker()
    return {
        "rounds": rounds,
        "steps": sum(one["steps"] for one in rounds),
        "found": found,
        "pulled": pulled,
        "cpu_seconds": sum(one["cpu_s"] for one in rounds),
    }


def _variant(
    name: str, usage: Usage, variant: str, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    cache = "device" if variant == CACHED else None
    model = MODELS[name](lambda rows, dim: fleet.nn.SparseEmbedding(dim, cache=cache)).to(device)
    for layer in model.modules():
        if isinstance(layer, SparseEmbedding):
            layer.requires_grad_(usage.trains_rows)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # a model of rows alone needs something that learns
        model.register_parameter("scale", nn.Parameter(torch.ones(1, device=device)))
    model = fleet.distributed_model(model)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    strategy = fleet.DistributedStrategy(**usage.strategy)
    optimizer = torch.optim.SGD(learning, lr=ps_timed.LR)
    return model, fleet.distributed_optimizer(optimizer, strategy)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    usage: Usage,
    device: torch.device,
) -> Callable[[], float]:
    batches = itertools.cycle(data)
    scale = getattr(model, "scale", None)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for _ in range(usage.micro):
            *inputs, labels = next(batches)
            there = [one.to(device) if one.is_floating_point() else one for one in inputs]
            out: Tensor = model(*there)
            out = out if scale is None else out * scale
            loss = binary_cross_entropy_with_logits(out, labels.to(device)) / usage.micro
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        return total

    return step


def _counts() -> tuple[int, int]:
    """Rows that lookups found on the device, and rows that they pulled and copied."""
    job = current()
    assert isinstance(job, ServedJob)
    figures = job.session.communicator.figures()
    return int(figures["cached_rows_found"]), int(figures["cached_rows_copied"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the result page."""
    options = _parse(argv)
    report.page("device_cache", CLAIM, sections(options), keep=options.write)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a variant in each turn")
    parser.add_argument("--batches", type=int, default=200, help="different batches")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
