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
from fleetlight.ps.plan import SYNC, Plan
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.replay.commit_log import ResumePoint

#: dense blocks of each server
Shares = Mapping[int, Sequence[NDArray[Any]]]


@dataclasses.dataclass
class PushRequest:
    """Nothing in it is the user's any more."""

    optimizer: int
    step: int
    options: list[dict[str, Any]]
    tables: dict[int, TableGradients]
    #: the dense blocks of each server
    blocks: dict[int, list[NDArray[Any]]]
    absent: list[int]
    skip: bool = False
    merged: int = 1
    #: `version` of each server's values that the gradients were made with
    seen: tuple[int, ...] = ()
    #: why no server may make this step, for any worker
    refusal: str = ""
    #: where the worker was, if it can go on from there
    moment: ResumePoint | None = None


def packed(
    update: Update,
    plan: Plan,
    placement: Placement,
    live: LocalParameters,
    shares: Shares | None = None,
) -> PushRequest:
    """Copy what is dense, which the user's code will go on writing to.

    `shares` is what the worker has learned, where it steps dense parameters itself.
    """
    blocks = {s: placement.blocks_of(s, update.optimizer) for s in range(plan.server_num)}
    if shares is None:
        dense = {s: [live.pack(b, update.dense) for b in mine] for s, mine in blocks.items()}
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


def check_differences(
    tables: Mapping[int, TableGradients],
    blocks: Mapping[int, Sequence[NDArray[Any]]],
    step: int,
    plan: Plan,
    placement: Placement,
    worker: int,
) -> None:
    """Refuse differences that are not finite before a part of them has been added anywhere."""
    if plan.on_nonfinite == "apply":
        return
    parts = {number: TablePart(part.ids, part.gradients) for number, part in tables.items()}
    places = [block for server in blocks for block in placement.blocks_of(server)]
    arrays = [array for mine in blocks.values() for array in mine]
    where = not_finite(Gradients(parts, arrays, places), plan)
    if where is not None:
        raise GradientError(refusal(f"worker {worker} brought a difference (step {step})", where))


def checked(parcel: PushRequest, plan: Plan, placement: Placement, worker: int) -> PushRequest:
    """What may be sent: with a gradient that is not finite nobody shall make a part of the step."""
    if parcel.skip or plan.on_nonfinite == "apply":
        return parcel
    tables = {n: TablePart(part.ids, part.gradients) for n, part in parcel.tables.items()}
    blocks = [b for server in parcel.blocks for b in placement.blocks_of(server, parcel.optimizer)]
    arrays = [array for mine in parcel.blocks.values() for array in mine]
    where = not_finite(Gradients(tables, arrays, blocks), plan)
    if where is None:
        return parcel
    text = refusal(f"worker {worker} made a gradient (step {parcel.step})", where)
    skip = plan.on_nonfinite == "skip"
    if not skip and plan.mode != SYNC:
        raise GradientError(text)
    empty = dataclasses.replace(parcel, tables={}, blocks={}, absent=[])
    return dataclasses.replace(empty, skip=skip, refusal="" if skip else text)
