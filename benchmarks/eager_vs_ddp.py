# SPDX-License-Identifier: Apache-2.0
"""Steps per second of Fleetlight's eager data parallel against torch's DistributedDataParallel.

Gloo processes with one thread each, two by default, train every variant's own copy of the model in
turn. `ddp` is listed twice: the ratio of the two is the noise of the measurement.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from benchmarks import interleave, models, report
from benchmarks.models import WORKLOADS, Batches, MakeVariant, Variant, Workload

CLAIM = (
    "Fleetlight's eager data parallel keeps at least 98 % of the steps per second of plain "
    "DistributedDataParallel: Gloo processes of one host, one thread each."
)
AT_LEAST = 0.98


def ours(workload: Workload, batches: Batches) -> Variant:
    """Fleetlight with its defaults."""
    import fleetlight as fleet

    plain = workload.model()
    optimizer = fleet.distributed_optimizer(workload.optimizer(plain))
    return Variant(plain, models.stepper(fleet.distributed_model(plain), optimizer, batches))


def ddp(
    workload: Workload,
    batches: Batches,
    *,
    view: bool = False,
    fused: bool = False,
    made: Callable[[Any], Any] = lambda model: model,
) -> Variant:
    """DistributedDataParallel; `view`: without its copy of every gradient."""
    plain = workload.model()
    optimizer = workload.optimizer(plain)
    if fused:
        optimizer = type(optimizer)(plain.parameters(), **{**optimizer.defaults, "fused": True})
    model = made(DistributedDataParallel(plain, gradient_as_bucket_view=view))
    return Variant(plain, models.stepper(model, optimizer, batches))


VARIANTS: dict[str, MakeVariant] = {
    "ddp": ddp,
    "ddp again": ddp,
    "ddp view": functools.partial(ddp, view=True),
    "fleetlight": ours,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every workload and write the result page."""
    parser = report.parser(__doc__, rounds=15)
    models.add_options(parser, ["mlp", "mlp8", "resnet50"], list(VARIANTS))
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    options = parser.parse_args(argv)
    if options.worker:
        models.work(options, VARIANTS, with_fleet="fleetlight" in options.variants)
        return 0

    def measured(processes: int, name: str) -> str:
        found = models.measure("eager_vs_ddp", name, processes, options)
        workers = [result["rounds"] for result in found]
        base, *rest = series = interleave.series(workers)
        bars = {"fleetlight": AT_LEAST}
        ratios = [report.Ratio(one, base, bars.get(one.name)) for one in rest]
        title = f"{WORKLOADS[name].title}: {processes} processes"
        return report.section(title, series, ratios, interleave.foreign(workers))

    sections = (measured(n, name) for n in options.processes for name in options.workloads)
    return report.page("eager_vs_ddp", CLAIM, sections, options.quick)


if __name__ == "__main__":
    sys.exit(main())
