# SPDX-License-Identifier: Apache-2.0
"""Steps per second of static programs against torch's DistributedDataParallel, plain and compiled.

Two Gloo processes with one thread each train every variant's own copy of the model in turn. `ddp`
may be listed twice: the ratio of the two is the noise of the measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import interleave, models, report
from benchmarks.eager_vs_ddp import ddp
from benchmarks.models import WORKLOADS, Batches, MakeVariant, Variant, Workload

CLAIM = (
    "Static programs beside DistributedDataParallel with gradient_as_bucket_view, 2 Gloo "
    "processes, one thread each. Generated Python: at least 1.10 times its steps per second on the "
    "small MLP and 0.92 times on ResNet-50; compiled by inductor 1.3 times on the small MLPs. The "
    "better of the two beside torch.compile(DDP): at least 0.93 times, 1.2 times on the small MLPs."
    " Capturing costs at most 0.3 s of CPU for an MLP and 3 s for ResNet-50."
)
#: of a variant over another, the least the median may be
BARS: dict[tuple[str, str], Mapping[str, float]] = {
    ("static fx", "ddp"): {"tiny": 1.10, "resnet50": 0.92},
    ("static inductor", "ddp"): {"tiny": 1.3, "mnist": 1.3, "mlp8": 1.3},
    ("best static", "compiled ddp"): {"tiny": 1.2, "mnist": 1.2, "mlp8": 1.2, "resnet50": 0.93},
}


def static(compile: str, workload: Workload, batches: Batches) -> Variant:
    """A captured program."""
    import fleetlight as fleet

    model = workload.model()
    optimizer = fleet.distributed_optimizer(workload.optimizer(model))
    x, y = batches[0]
    began = time.process_time()
    program = fleet.static.capture(model, cross_entropy, optimizer, {"x": x, "y": y})
    assert program.form.graph.nodes
    spent = time.process_time() - began
    executor = fleet.static.Executor(compile=compile)

    def step() -> None:
        x, y = models.next_batch(batches)
        executor.run(program, {"x": x, "y": y}, ["loss"])

    return Variant(model, step, spent)


VIEW = functools.partial(ddp, view=True)
VARIANTS: dict[str, MakeVariant] = {
    "ddp": VIEW,
    "ddp again": VIEW,
    "ddp fused": functools.partial(ddp, view=True, fused=True),
    "compiled ddp": functools.partial(ddp, view=True, made=torch.compile),
    "static fx": functools.partial(static, "fx"),
    "static inductor": functools.partial(static, "inductor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every workload and write the result page."""
    parser = report.parser(__doc__, rounds=15)
    models.add_options(parser, ["tiny", "mnist", "mlp8", "resnet50"], list(VARIANTS))
    options = parser.parse_args(argv)
    if options.worker:
        with_fleet = any(name.startswith("static") for name in options.variants)
        models.work(options, VARIANTS, with_fleet, _warm_up)
        return 0

    def measured(name: str) -> str:
        found = models.measure("static_vs_ddp", name, 2, options)
        workers = [result["rounds"] for result in found]
        series = interleave.series(workers)
        shares = interleave.foreign(workers)
        text = report.section(WORKLOADS[name].title, series, ratios(name, series), shares)
        return f"{text}\n\n{_preparation(found)}"

    return report.page("static_vs_ddp", CLAIM, map(measured, options.workloads), options.quick)


def ratios(workload: str, series: Sequence[report.Series]) -> list[report.Ratio]:
    """Each over plain DDP, and the best of ours over the compiled one, with what is claimed."""
    known = {one.name: one for one in series}
    base, *rest = series
    pairs = [(one, base) for one in rest]
    ours = [one for one in series if one.name.startswith("static")]
    if ours and "compiled ddp" in known:
        pairs.append((_best(ours), known["compiled ddp"]))
    return [
        report.Ratio(over, under, BARS.get((over.name, under.name), {}).get(workload))
        for over, under in pairs
    ]


def _best(ours: Sequence[report.Series]) -> report.Series:
    """That of the highest median: whoever trains chooses once."""
    best = max(ours, key=lambda one: report.Spread.of(one.rates).median)
    return dataclasses.replace(best, name="best static")


def _preparation(found: Sequence[dict[str, dict[str, list[float]]]]) -> str:
    """What capturing and the first steps cost: the slowest worker's."""
    rows = [
        (name, *(report.short(max(r["prepared"][name][i] for r in found)) for i in range(2)))
        for name in found[0]["prepared"]
    ]
    return report.table(("variant", "CPU s to capture", "CPU s of the first steps"), rows)


def _warm_up() -> None:
    """A capture of something else: the first one of a process imports a lot."""
    import fleetlight as fleet

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"x": torch.rand(3, 2), "y": torch.zeros(3, dtype=torch.long)}
    fleet.static.capture(model, cross_entropy, optimizer, inputs)


if __name__ == "__main__":
    sys.exit(main())
