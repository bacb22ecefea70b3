# SPDX-License-Identifier: Apache-2.0
"""Pulls the rows of a run and puts them, with the index of each id, into the program's state.

After the distinct rows of a table may come shadow rows, which only padding reads; their gradients
are dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.errors import PlanError
from fleetlight.kernels import dedup, sum_by
from fleetlight.ps.layers.device_rows import ArrivingGradients, copied
from fleetlight.ps.layers.embedding import (
    TableLayer,
    bag_bounds,
    bounds_without,
    given_counts,
    ids_of,
    refuse_outside,
)
from fleetlight.ps.layers.handle import TableHandle, Visit
from fleetlight.ps.layers.staging import is_on_device, staging_of
from fleetlight.ps.update import Floats, Ids, TableGradients
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.lookups import ROWS, Lookup, LookupInputs, LookupPull
from fleetlight.static.graph.state import Slot

Places = NDArray[np.int32]


@dataclasses.dataclass
class PulledRows:
    """The rows of one table for one run."""

    #: the number of the table; -1: a layer's own weight
    table: int
    visit: Visit
    #: shows and clicks of the distinct ids
    counts: tuple[Floats, Floats] | None
    #: the distinct ids that learn, if not all do
    learning: NDArray[np.bool_] | None

    def gradients(self, summed: Tensor) -> TableGradients:
        """The gradients to push, from the graph's gradient of all rows."""
        own = summed[: len(self.visit.wanted.ids)].float()
        if is_on_device(own):
            arrival = staging_of(own.device).to_host(own)
            part: TableGradients = ArrivingGradients(self.visit, self.counts, arrival)
        else:
            part = self.visit.part(own.numpy(), self.counts)
        return part if self.learning is None else part.only(self.learning)


class RunLookups:
    """The lookups of one run: their ids, computed from its feeds, and later their rows."""

    def __init__(self, form: Form, feeds: Sequence[Tensor]) -> None:
        self.form, split = form, form.split
        self._pulls = () if split is None else split.pulls
        outputs = _inputs_of_lookups(form, feeds) if self._pulls else ()
        self._asked = [
            [_LookupRequest(form.lookups[one.number], one, outputs) for one in pull.wanted]
            for pull in self._pulls
        ]
        self._handles = [handle_of(asked[0].lookup) for asked in self._asked]
        self._ids = [_joined([one.read for one in asked]) for asked in self._asked]
        #: False if their ids may change before the run, since they depend on state
        self.are_final = split is None or all(isinstance(need, Feed) for need in split.needs)

    @functools.cached_property
    def announced(self) -> dict[int, Ids]:
        """The ids of each table on servers, by its number: always the same dict."""
        return {
            handle.number: ids
            for handle, ids in zip(self._handles, self._ids, strict=True)
            if isinstance(handle, TableHandle)
        }

    def pull(self, *, insert: bool) -> list[PulledRows]:
        """Pull the rows into the state of the program, with one request to each server."""
        trains = [insert and any(one.lookup.trains for one in asked) for asked in self._asked]
        for handle, asked in zip(self._handles, self._asked, strict=True):
            for one in asked:
                handle.reached(one.flat)
                refuse_outside(one.flat, handle.plan.name, handle.plan.rows)
        visits = _visits(list(zip(self._handles, self._ids, trains, strict=True)))
        found = zip(self._pulls, self._handles, self._asked, visits, strict=True)
        return [_laid_out(pull, table.number, asked, visit) for pull, table, asked, visit in found]


def pull(form: Form, feeds: Sequence[Tensor], *, insert: bool) -> list[PulledRows]:
    """Pull the rows of a run into the state of a program, in the order of its pulls."""
    return RunLookups(form, feeds).pull(insert=insert)


def _inputs_of_lookups(form: Form, feeds: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of the ids program."""
    assert form.split is not None
    by_name = dict(zip((feed.name for feed in form.feeds), feeds, strict=True))
    for need in form.split.needs:
        if isinstance(need, Slot):
            need.refresh()
    given = [
        by_name[need.name] if isinstance(need, Feed) else need.tensor for need in form.split.needs
    ]
    with torch.no_grad():
        outputs: Sequence[Tensor] = form.split.ids(*given)
    return outputs


def _joined(ids: Sequence[Ids]) -> Ids:
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


def _visits(asked: Sequence[tuple[TableHandle | _LocalTable, Ids, bool]]) -> list[Visit]:
    """The rows of each table, in the same order."""
    served = [
        (table, ids, trains) for table, ids, trains in asked if isinstance(table, TableHandle)
    ]
    visits = iter(TableHandle.visit_all(served) if served else ())
    return [
        next(visits) if isinstance(table, TableHandle) else table.visit(ids, trains)
        for table, ids, trains in asked
    ]


class _LookupRequest:
    """One lookup of a run."""

    def __init__(self, lookup: Lookup, wanted: LookupInputs, outputs: Sequence[Tensor]) -> None:
        self.lookup = lookup
        name = type(lookup.layer).__name__
        ids = outputs[wanted.ids]
        self.shape = ids.shape
        self.flat = ids_of(ids, name)
        #: a mask of the ids that are not padding; None if no id is padding
        self.real: NDArray[np.bool_] | None = None
        if lookup.padding is not None:
            real = self.flat != lookup.padding
            self.real = None if real.all() else real
        #: ids whose rows are read
        self.read: Ids = self.flat
        if self.real is not None and lookup.drops_padding:
            self.read = self.flat[self.real]
        show, click = (None if n is None else outputs[n] for n in (wanted.show, wanted.click))
        self.given = given_counts(show, click, len(self.flat), self.real)
        self.bounds: NDArray[np.int64] | None = None
        if lookup.mode != ROWS:
            offsets = None if wanted.offsets is None else outputs[wanted.offsets]
            self.bounds = bag_bounds(ids, offsets, lookup.includes_last)
        #: whether its padding reads a shadow row in the graph
        self.shadowed = self.real is not None and (lookup.mode == ROWS or wanted.weighted)
        if self.bounds is not None and self.real is not None and not self.shadowed:
            self.bounds = bounds_without(self.bounds, self.real)

    def places(self, inverse: Places, shadow: int) -> Places:
        """The row index of each id; `shadow` for padding."""
        if not self.shadowed:
            return inverse
        assert self.real is not None
        if len(inverse) == len(self.flat):
            return np.where(self.real, inverse, np.int32(shadow))
        places = np.full(len(self.flat), shadow, np.int32)
        places[self.real] = inverse
        return places


def _laid_out(
    pull: LookupPull, table: int, asked: Sequence[_LookupRequest], visit: Visit
) -> PulledRows:
    """Put rows and row indices into the slots of the program."""
    rows, extra = visit.found, []
    parts = _parts(visit.inverse, asked)
    slots = iter(pull.slots)
    of_rows = next(slots)
    for one, inverse in zip(asked, parts, strict=True):
        if one.shadowed:
            extra.append(_shadow(one, inverse, visit))
        places = one.places(inverse, len(rows) + len(extra) - 1)
        shape = one.shape if one.bounds is None else (-1,)
        _put(next(slots), places.reshape(shape))
        if one.bounds is not None:
            _put(next(slots), one.bounds)
    _put(of_rows, _with(rows, extra))
    return PulledRows(table, visit, _counts(asked, visit), _learning(asked, parts, visit))


def _parts(inverse: Places, asked: Sequence[_LookupRequest]) -> list[Places]:
    """The index of each id among the distinct ones, by lookup."""
    ends = list(itertools.accumulate(len(one.read) for one in asked))
    return [inverse[end - len(one.read) : end] for one, end in zip(asked, ends, strict=True)]


def _with(rows: Floats | Tensor, extra: Sequence[Floats]) -> Floats | Tensor:
    """Rows, and the shadow rows after them."""
    if isinstance(rows, Tensor):
        shadows = [copied(row, rows.device) for row in extra]
        return torch.cat([rows, *shadows]) if shadows else rows
    if extra:
        return np.concatenate([rows, *extra])
    # torch warns of read-only arrays
    return rows if rows.flags.writeable else rows.copy()


def _put(slot: Any, value: NDArray[Any] | Tensor) -> None:
    if isinstance(value, Tensor):
        slot.tensor = value.to(slot.tensor.device)
    elif is_on_device(slot.tensor):
        slot.tensor = staging_of(slot.tensor.device).to_device(value)
    else:
        slot.tensor = torch.from_numpy(value)


def _shadow(asked: _LookupRequest, inverse: Places, visit: Visit) -> Floats:
    """The row that padding reads: zeros, or the row of its id."""
    if asked.lookup.drops_padding:
        return np.zeros((1, visit.found.shape[1]), np.float32)
    assert asked.real is not None
    return visit.rows[inverse[~asked.real][:1]]


def _learning(
    asked: Sequence[_LookupRequest], parts: Sequence[Places], visit: Visit
) -> NDArray[np.bool_] | None:
    """A mask of the rows that learn: not those that only padding reads."""
    if all(one.real is None or one.lookup.drops_padding for one in asked):
        return None
    learning = np.zeros(len(visit.wanted.ids), np.bool_)
    for one, inverse in zip(asked, parts, strict=True):
        whole = one.real is None or one.lookup.drops_padding
        learning[inverse if whole else inverse[one.real]] = True
    return learning


def _counts(asked: Sequence[_LookupRequest], visit: Visit) -> tuple[Floats, Floats] | None:
    """Shows and clicks of each distinct id; None if a lookup has neither."""
    if any(one.given[0] is None and one.given[1] is None for one in asked):
        return None
    # with clicks only, every id counts as shown once
    shown = [np.ones(len(o.read), np.float32) if o.given[0] is None else o.given[0] for o in asked]
    clicked = [
        np.zeros(len(o.read), np.float32) if o.given[1] is None else o.given[1] for o in asked
    ]
    both = np.stack([np.concatenate(shown), np.concatenate(clicked)], axis=1)
    summed = sum_by(both, visit.inverse, len(visit.wanted.ids))
    return np.ascontiguousarray(summed[:, 0]), np.ascontiguousarray(summed[:, 1])


# -- tables


def handle_of(lookup: Lookup) -> TableHandle | _LocalTable:
    """The handle of a table, or the layer's own weight if it has not moved."""
    layer = lookup.layer
    forward = layer.__dict__.get("forward")
    handle = getattr(layer, "handle", None) or getattr(forward, "handle", None)
    if isinstance(handle, TableHandle):
        return handle
    if isinstance(layer, TableLayer):
        raise PlanError(
            f"{lookup.table}: its table is not open yet; call fleet.init_worker() before the "
            "program runs, after optimizer.minimize(loss) or fleet.distributed_model(model)"
        )
    return _LocalTable(lookup)


@dataclasses.dataclass
class _LayerPlan:
    """The part of a table's plan that a pull needs."""

    name: str
    rows: int


class _LocalTable:
    """The rows of a layer's own weight, which has not moved onto servers."""

    number: ClassVar[int] = -1

    def __init__(self, lookup: Lookup) -> None:
        self._weight: nn.Parameter = lookup.layer.weight  # type: ignore[assignment]
        self.plan = _LayerPlan(lookup.table, len(self._weight))

    def reached(self, ids: Ids) -> None:
        """Do nothing: no prefetch learns from it."""

    def visit(self, ids: Ids, insert: bool) -> Visit:
        """The rows of these ids, without training."""
        wanted = dedup(ids)
        rows = self._weight.detach()[torch.from_numpy(wanted.ids).to(self._weight.device)]
        return Visit(wanted, rows.to("cpu", torch.float32).numpy())
