# SPDX-License-Identifier: Apache-2.0
"""Lookups as they stand in a program: operations without values, which `split_ps` replaces.

Rows are not there while a program is written, and not in the process at all. So these have only
the shapes of what they will be.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.static.graph.lookups import ROWS

_library: Any = torch.library.Library("fleetlight", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "look_up(Tensor weight, Tensor ids, Tensor? offsets, Tensor? each, Tensor? show, "
    "Tensor? click, int number, str mode, bool last) -> Tensor"
)
_library.define(
    "table_gradient(Tensor gradient, Tensor weight, Tensor? each, int number) -> Tensor"
)
_library.define("each_gradient(Tensor gradient, Tensor each, int number) -> Tensor")

#: the result of a lookup: rows of ids, or of bags of them
LOOK_UP = torch.ops.fleetlight.look_up.default
#: the gradient of a table by the gradient of a lookup's result
TABLE_GRADIENT = torch.ops.fleetlight.table_gradient.default
#: the gradient of what each id of a bag weighs
EACH_GRADIENT = torch.ops.fleetlight.each_gradient.default


def look_up(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    each: Tensor | None,
    counts: tuple[Tensor | None, Tensor | None],
    facts: tuple[int, str, bool],
) -> Tensor:
    """Write a lookup; `facts` are its number, its mode, and whether offsets end with the end."""
    out: Tensor = _LookUp.apply(  # type: ignore[no-untyped-call]
        weight, each, ids, offsets, counts, facts
    )
    return out


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        each: Tensor | None,
        ids: Tensor,
        offsets: Tensor | None,
        counts: tuple[Tensor | None, Tensor | None],
        facts: tuple[int, str, bool],
    ) -> Any:
        ctx.weight, ctx.each, ctx.number = weight, each, facts[0]
        return LOOK_UP(weight, ids, offsets, each, *counts, *facts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_each = None
        if ctx.each is not None and ctx.needs_input_grad[1]:
            of_each = EACH_GRADIENT(gradient, ctx.each, ctx.number)
        table = TABLE_GRADIENT(gradient, ctx.weight, ctx.each, ctx.number)
        return table, of_each, None, None, None, None


def _rows(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    each: Tensor | None,
    show: Tensor | None,
    click: Tensor | None,
    number: int,
    mode: str,
    last: bool,
) -> Tensor:
    """The shape of the result."""
    dim = weight.shape[-1]
    if mode == ROWS:
        return weight.new_empty([*ids.shape, dim])
    bags = ids.shape[0] if offsets is None else offsets.shape[0] - int(last)
    return weight.new_empty([bags, dim])


def _from_weight(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    each: Tensor | None,
    show: Tensor | None,
    click: Tensor | None,
    number: int,
    mode: str,
    last: bool,
) -> Tensor:
    """A program that nobody has split: torch's own layers have their rows still."""
    if not len(weight):
        raise PlanError(
            "the program reads rows of a table, but nothing says where they are: call "
            "optimizer.minimize(loss) with the optimizer that fleet.distributed_optimizer "
            "answered, or run program.clone(for_test=True)"
        )
    if mode == ROWS:
        return F.embedding(ids, weight)
    return F.embedding_bag(
        ids, weight, offsets, mode=mode, per_sample_weights=each, include_last_offset=last
    )


def _like_weight(gradient: Tensor, weight: Tensor, each: Tensor | None, number: int) -> Tensor:
    return torch.empty_like(weight)


def _like_each(gradient: Tensor, each: Tensor, number: int) -> Tensor:
    return torch.empty_like(each)


_library.impl("look_up", _from_weight, "CompositeExplicitAutograd")
torch.library.register_fake("fleetlight::look_up", _rows, lib=_library)
torch.library.register_fake("fleetlight::table_gradient", _like_weight, lib=_library)
torch.library.register_fake("fleetlight::each_gradient", _like_each, lib=_library)
