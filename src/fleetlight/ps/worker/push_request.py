# SPDX-License-Identifier: Apache-2.0
"""`PushRequest`: an update in the form in which it is sent, with the parts of all servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import GradientError
from fleetlight.ps.gradients import Gradients, TablePart, not_finite, refusal
from fleetlight.ps.placement import Placement
from fleetlight.ps.plan import Plan
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.wire_forms import Output, form_of, no_output
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.ps.worker.reply_values import Ahead

#: dense blocks of each server
Shares = Mapping[int, Sequence[NDArray[Any]]]


@dataclasses.dataclass
class PushRequest:
    """Its arrays are copies: the script may overwrite its own."""

    optimizer: int
    step: int
    options: list[dict[str, Any]]
    tables: dict[int, TableGradients]
    #: the dense blocks of each server
    blocks: dict[int, list[NDArray[Any]]]
    absent: list[int]
    skip: bool = False
    merged: int = 1
    #: `version` of each server's values that the gradients were computed with
    seen: tuple[int, ...] = ()
    #: the error with which the step fails for all workers
    refusal: str = ""
    #: the position of the step, for the worker's journal
    origin: StepOrigin | None = None
    #: rows of later batches, which the reply returns
    ahead: list[Ahead] = dataclasses.field(default_factory=list)
    #: tables with a cache: the reply has the ids that other workers changed
    reports: list[int] = dataclasses.field(default_factory=list)


def packed(
    update: Update,
    plan: Plan,
    placement: Placement,
    live: LocalParameters,
    shares: Shares | None = None,
    memory: Sequence[Output] | None = None,
) -> PushRequest:
    """Build a push request; copy dense gradients, which the script may overwrite.

    `shares` are the differences of a worker that steps dense parameters itself. `memory` is that
    of each server's dense blocks.
    """
    outputs = memory or [no_output] * plan.server_num
    blocks = {s: placement.blocks_of(s, update.optimizer) for s in range(plan.server_num)}
    if shares is None:
        dense = {
            s: [live.pack(b, update.dense, outputs[s]) for b in mine] for s, mine in blocks.items()
        }
        absent = [number for number, values in update.dense.items() if values is None]
    else:
        dense, absent = {s: list(shares.get(s, ())) for s in blocks}, []
    return PushRequest(
        optimizer=update.optimizer,
        step=update.step,
        options=update.options,
        tables=update.tables,
        blocks=dense,
        absent=absent,
        skip=update.skip,
        seen=update.seen,
    )


def behind_tables(update: Update, plan: Plan, outputs: Sequence[Output]) -> Sequence[Output]:
    """By server: the memory behind the arrays of tables, which the transport copies there."""
    for number, part in update.tables.items():
        table = plan.tables[number]
        counted = () if part.shows is None else ("float32", "float32")
        for server, output in enumerate(outputs):
            count = int(part.starts[server + 1] - part.starts[server])
            output((count,), "int64")
            for dtype, shape in form_of(table).shapes(count, table.dim):
                output(shape, dtype)
            for dtype in counted:
                output((count,), dtype)
    return outputs


def check_differences(
    tables: Mapping[int, TableGradients],
    blocks: Mapping[int, Sequence[NDArray[Any]]],
    step: int,
    plan: Plan,
    placement: Placement,
    worker: int,
) -> None:
    """Raise for differences that are not finite, before any server adds a part of them."""
    if plan.on_nonfinite == "apply":
        return
    parts = {number: TablePart(part.ids, part.gradients) for number, part in tables.items()}
    places = [block for server in blocks for block in placement.blocks_of(server)]
    arrays = [array for mine in blocks.values() for array in mine]
    where = not_finite(Gradients(parts, arrays, places), plan)
    if where is not None:
        raise GradientError(refusal(f"worker {worker} sent a difference (step {step})", where))


def checked(push: PushRequest, plan: Plan, placement: Placement, worker: int) -> PushRequest:
    """Replace a request with gradients that are not finite: no server may apply a part of it."""
    if push.skip or plan.on_nonfinite == "apply":
        return push
    tables = {n: TablePart(part.ids, part.gradients) for n, part in push.tables.items()}
    blocks = [b for server in push.blocks for b in placement.blocks_of(server, push.optimizer)]
    arrays = [array for mine in push.blocks.values() for array in mine]
    where = not_finite(Gradients(tables, arrays, blocks), plan)
    if where is None:
        return push
    text = refusal(f"worker {worker} computed a gradient (step {push.step})", where)
    skip = plan.on_nonfinite == "skip"
    if not skip and not plan.steps_together:
        raise GradientError(text)
    empty = dataclasses.replace(push, tables={}, blocks={}, absent=[])
    return dataclasses.replace(empty, skip=skip, refusal="" if skip else text)
