# SPDX-License-Identifier: Apache-2.0
"""Between the ids of a run and its training graph: asks tables for rows, and says where they lie.

Behind the distinct rows of a table may be others, which only padding reads: their gradients are
nobody's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.errors import PlanError
from fleetlight.kernels import dedup, sum_by
from fleetlight.ps.layers.embedding import (
    TableLayer,
    bag_bounds,
    given_counts,
    ids_of,
    refuse_outside,
)
from fleetlight.ps.layers.handle import TableHandle, Visit
from fleetlight.ps.update import Floats, Ids, TableGradients
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.lookups import ROWS, Lookup, LookupInputs, LookupPull
from fleetlight.static.graph.state import Slot

Places = NDArray[np.int32]


@dataclasses.dataclass
class PulledRows:
    """The rows of one table for one run."""

    visit: Visit
    #: shows and clicks of the distinct ids
    counts: tuple[Floats, Floats] | None
    #: which of the distinct ids learn, where that is not all
    learning: NDArray[np.bool_] | None

    def gradients(self, summed: Tensor) -> TableGradients:
        """What is pushed, by the gradient that the graph has for all its rows."""
        wanted = self.visit.wanted
        shows, clicks = self.counts or (None, None)
        made: Floats = summed.to("cpu", torch.float32).numpy()[: len(wanted.ids)]
        part = TableGradients(wanted.ids, wanted.starts, made, shows, clicks)
        return part if self.learning is None else part.only(self.learning)


def pull(form: Form, feeds: Sequence[Tensor], *, insert: bool) -> list[PulledRows]:
    """Bring the rows that a run needs into the state of a program, in the order of its pulls."""
    if form.split is None or not form.split.pulls:
        return []
    by_name = dict(zip((feed.name for feed in form.feeds), feeds, strict=True))
    for need in form.split.needs:
        if isinstance(need, Slot):
            need.refresh()
    given = [
        by_name[need.name] if isinstance(need, Feed) else need.tensor for need in form.split.needs
    ]
    with torch.no_grad():
        answers = form.split.ids(*given)
    return [_pulled(form.lookups, one, answers, insert) for one in form.split.pulls]


def _pulled(
    lookups: Sequence[Lookup], pull: LookupPull, answers: Sequence[Tensor], insert: bool
) -> PulledRows:
    asked = [_Asked(lookups[wanted.number], wanted, answers) for wanted in pull.wanted]
    handle = handle_of(asked[0].lookup)
    for one in asked:
        handle.reached(one.flat)
        refuse_outside(one.flat, handle.plan.name, handle.plan.rows)
    ids = [one.read for one in asked]
    trains = insert and any(one.lookup.trains for one in asked)
    visit = handle.visit(ids[0] if len(ids) == 1 else np.concatenate(ids), trains)
    return _laid_out(pull, asked, visit)


class _Asked:
    """One lookup of a run."""

    def __init__(self, lookup: Lookup, wanted: LookupInputs, answers: Sequence[Tensor]) -> None:
        self.lookup = lookup
        name = type(lookup.layer).__name__
        ids = answers[wanted.ids]
        self.shape = ids.shape
        self.flat = ids_of(ids, name)
        #: which of the ids are no padding, where some are
        self.real: NDArray[np.bool_] | None = None
        if lookup.padding is not None:
            real = self.flat != lookup.padding
            self.real = None if real.all() else real
        #: ids of which rows are read
        self.read: Ids = self.flat
        if self.real is not None and lookup.drops_padding:
            self.read = self.flat[self.real]
        show, click = (None if n is None else answers[n] for n in (wanted.show, wanted.click))
        self.given = given_counts(show, click, len(self.flat), self.real)
        self.bounds: NDArray[np.int64] | None = None
        if lookup.mode != ROWS:
            offsets = None if wanted.offsets is None else answers[wanted.offsets]
            self.bounds = bag_bounds(ids, offsets, lookup.includes_last)
        #: whether its padding has a place in the graph, where it reads a row of its own
        self.shadowed = self.real is not None and (lookup.mode == ROWS or wanted.weighed)
        if self.bounds is not None and self.real is not None and not self.shadowed:
            self.bounds = np.concatenate(([0], np.cumsum(self.real)))[self.bounds].astype(np.int64)

    def places(self, inverse: Places, shadow: int) -> Places:
        """Where its ids find their rows, padding at `shadow`."""
        if not self.shadowed:
            return inverse
        assert self.real is not None
        if len(inverse) == len(self.flat):
            return np.where(self.real, inverse, np.int32(shadow))
        places = np.full(len(self.flat), shadow, np.int32)
        places[self.real] = inverse
        return places


def _laid_out(pull: LookupPull, asked: Sequence[_Asked], visit: Visit) -> PulledRows:
    """Put rows and places into the slots of the program."""
    rows, extra = visit.rows, []
    parts = _parts(visit.inverse, asked)
    slots = iter(pull.slots)
    of_rows = next(slots)
    for one, inverse in zip(asked, parts, strict=True):
        if one.shadowed:
            extra.append(_shadow(one, inverse, rows))
        places = one.places(inverse, len(rows) + len(extra) - 1)
        shape = one.shape if one.bounds is None else (-1,)
        _put(next(slots), torch.from_numpy(places).view(shape))
        if one.bounds is not None:
            _put(next(slots), torch.from_numpy(one.bounds))
    if extra:
        rows = np.concatenate([rows, *extra])
    elif not rows.flags.writeable:
        # torch warns of arrays that it could write to and must not
        rows = rows.copy()
    _put(of_rows, torch.from_numpy(rows))
    return PulledRows(visit, _counts(asked, visit), _learning(asked, parts, visit))


def _parts(inverse: Places, asked: Sequence[_Asked]) -> list[Places]:
    """Of each lookup, where its ids are among the distinct ones."""
    ends = list(itertools.accumulate(len(one.read) for one in asked))
    return [inverse[end - len(one.read) : end] for one, end in zip(asked, ends, strict=True)]


def _put(slot: Any, value: Tensor) -> None:
    slot.tensor = value.to(slot.tensor.device)


def _shadow(asked: _Asked, inverse: Places, rows: Floats) -> Floats:
    """What padding reads: zeros, or the row of its id."""
    if asked.lookup.drops_padding:
        return np.zeros((1, rows.shape[1]), np.float32)
    assert asked.real is not None
    return rows[inverse[~asked.real][:1]]


def _learning(
    asked: Sequence[_Asked], parts: Sequence[Places], visit: Visit
) -> NDArray[np.bool_] | None:
    """A row that only padding reads learns nothing."""
    if all(one.real is None or one.lookup.drops_padding for one in asked):
        return None
    learning = np.zeros(len(visit.wanted.ids), np.bool_)
    for one, inverse in zip(asked, parts, strict=True):
        whole = one.real is None or one.lookup.drops_padding
        learning[inverse if whole else inverse[one.real]] = True
    return learning


def _counts(asked: Sequence[_Asked], visit: Visit) -> tuple[Floats, Floats] | None:
    """Shows and clicks of each distinct id; none where some lookup says nothing of them."""
    if any(one.given[0] is None and one.given[1] is None for one in asked):
        return None
    # whoever gives clicks only means that everything was shown
    shown = [np.ones(len(o.read), np.float32) if o.given[0] is None else o.given[0] for o in asked]
    clicked = [
        np.zeros(len(o.read), np.float32) if o.given[1] is None else o.given[1] for o in asked
    ]
    both = np.stack([np.concatenate(shown), np.concatenate(clicked)], axis=1)
    summed = sum_by(both, visit.inverse, len(visit.wanted.ids))
    return np.ascontiguousarray(summed[:, 0]), np.ascontiguousarray(summed[:, 1])


# -- where rows are


def handle_of(lookup: Lookup) -> TableHandle | _Here:
    """The way to a table; torch's own layers may have their rows still."""
    layer = lookup.layer
    forward = layer.__dict__.get("forward")
    handle = getattr(layer, "handle", None) or getattr(forward, "handle", None)
    if isinstance(handle, TableHandle):
        return handle
    if isinstance(layer, TableLayer):
        raise PlanError(
            f"{lookup.table}: its table is not open yet; call fleet.init_worker() before the "
            "program runs, behind optimizer.minimize(loss) or fleet.distributed_model(model)"
        )
    return _Here(lookup)


@dataclasses.dataclass
class _LayerPlan:
    """What is asked of the plan of a table."""

    name: str
    rows: int


class _Here:
    """Rows that have not moved: those of the layer's own weight."""

    def __init__(self, lookup: Lookup) -> None:
        self._weight: nn.Parameter = lookup.layer.weight  # type: ignore[assignment]
        self.plan = _LayerPlan(lookup.table, len(self._weight))

    def reached(self, ids: Ids) -> None:
        """Nobody wants to know."""

    def visit(self, ids: Ids, insert: bool) -> Visit:
        """The rows, which nothing trains."""
        wanted = dedup(ids)
        rows = self._weight.detach()[torch.from_numpy(wanted.ids).to(self._weight.device)]
        return Visit(wanted, rows.to("cpu", torch.float32).numpy())
