# SPDX-License-Identifier: Apache-2.0
"""What a program knows of tables: its lookups, and, once it is split, what is pulled and pushed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from torch import fx, nn

from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.state import Slot

if TYPE_CHECKING:
    from fleetlight.kernels.bags import Mode

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
class Wanted:
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
class Pull:
    """The rows of one table that a run needs, for all its lookups at once."""

    table: str
    wanted: tuple[Wanted, ...]
    #: the inputs of the graph: the rows, then of each lookup the places of its ids among them and,
    #: of bags, where they begin
    slots: tuple[Slot, ...] = ()


@dataclasses.dataclass(frozen=True)
class Split:
    """A program in three: the ids of a run, the graph that computes with their rows, the push."""

    #: answers what lookups are given; it takes the state and the feeds in `needs`
    ids: fx.GraphModule
    needs: tuple[Slot | Feed, ...]
    pulls: tuple[Pull, ...]
    #: by table, the node with the gradient of its rows
    pushes: Mapping[str, str]
