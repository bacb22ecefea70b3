# SPDX-License-Identifier: Apache-2.0
"""What a program knows of tables: its lookups, and, once it is split, what is pulled and pushed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fleetlight.errors import PlanError
from fleetlight.kernels.ids.bags import Mode
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.state import Slot

#: a lookup that answers a row for each id, and not one for each bag
ROWS: Literal["rows"] = "rows"


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """A call of a layer whose rows are in a table. Its number is its place in `Form.lookups`."""

    layer: nn.Module
    #: how rows become a result
    mode: Mode | Literal["rows"]
    #: whether its rows learn
    trains: bool
    #: whether ids that pad are left out of what is read, and not just out of what learns
    drops_padding: bool
    #: as the model calls it; layers with a common name share one
    table: str = ""

    @property
    def padding(self) -> int | None:
        """The id that stands for none."""
        padding: int | None = self.layer.padding_idx  # type: ignore[assignment]
        return padding

    @property
    def includes_last(self) -> bool:
        """Whether offsets of bags end with the number of ids."""
        return bool(getattr(self.layer, "include_last_offset", False))


@dataclasses.dataclass(frozen=True)
class LookupInputs:
    """What a lookup is given by the program of the ids: places among its answers."""

    #: in `Form.lookups`
    number: int
    ids: int
    offsets: int | None = None
    show: int | None = None
    click: int | None = None
    #: whether each id of a bag has a weight
    weighed: bool = False


@dataclasses.dataclass(frozen=True)
class LookupPull:
    """The rows of one table that a run needs, for all its lookups at once."""

    table: str
    wanted: tuple[LookupInputs, ...]
    #: the inputs of the graph: the rows, then of each lookup the places of its ids among them and,
    #: of bags, where they begin
    slots: tuple[Slot, ...] = ()


@dataclasses.dataclass(frozen=True)
class Split:
    """A program in three: the ids of a run, the graph that computes with their rows, the push."""

    #: answers what lookups are given; it takes the state and the feeds in `needs`
    ids: fx.GraphModule
    needs: tuple[Slot | Feed, ...]
    pulls: tuple[LookupPull, ...]
    #: by table, the node with the gradient of its rows
    pushes: Mapping[str, str]


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
