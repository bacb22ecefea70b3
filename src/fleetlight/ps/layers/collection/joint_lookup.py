# SPDX-License-Identifier: Apache-2.0
"""The lookup of many features: one dedup for each table, one request to each server.

One kernel computes all results, and one the gradients of all distinct rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from fleetlight.errors import ConfigError
from fleetlight.kernels.ids import pooling as p
from fleetlight.ps.layers.collection.feature_ids import FeatureIds
from fleetlight.ps.layers.embedding import (
    Given,
    SparseEmbeddingBag,
    TableLayer,
    bounds_without,
    given_counts,
    ids_of,
    sample_weights,
)
from fleetlight.ps.layers.grad_accumulation import accumulated
from fleetlight.ps.layers.handle import Counts, TableHandle, Visit
from fleetlight.ps.layers.lookup import as_floats
from fleetlight.ps.update import Floats, Ids, TableGradients
from fleetlight.torch_compat.tensors import without_functions

Bounds = NDArray[np.int64]
Places = NDArray[np.int32]
_MODES: Mapping[str | None, int] = {"sum": p.SUM, "mean": p.MEAN, "max": p.MAX, None: p.EACH}


class FeatureLookup:
    """The ids of one feature in a forward; `layer` has its table."""

    def __init__(self, name: str, layer: TableLayer, given: FeatureIds) -> None:
        where = f"EmbeddingCollection: feature {name!r}"
        self.name = name
        self.layer = layer
        self.flat = ids_of(given.ids, where)
        #: the start of each sample, and the end of the last one; not checked yet
        self.bounds = _bounds(given, len(self.flat), where)
        combiner = layer.combiner if isinstance(layer, SparseEmbeddingBag) else None
        self.weights = sample_weights(given.weights, given.ids, combiner, where)
        self.mode = _MODES[combiner] if self.weights is None else p.WEIGHTED
        #: a mask of the ids that are not padding; None if none is padding
        self.real: NDArray[np.bool_] | None = None
        #: the ids whose rows are read
        self.read: Ids = self.flat
        padding = layer.padding_idx
        if padding is not None and (self.flat == padding).any():
            self.real = self.flat != padding
            self.read = self.flat[self.real]
            if self.weights is not None:
                self.weights = self.weights[torch.from_numpy(self.real).to(self.weights.device)]
        self.given: Given = given_counts(given.show, given.click, len(self.flat), self.real)

    @property
    def is_pooled(self) -> bool:
        """False for a feature with a row for each id."""
        return self.mode != p.EACH

    @property
    def reads_zeros(self) -> bool:
        """True when padding has a row, of zeros."""
        return self.real is not None and not self.is_pooled

    @property
    def size(self) -> int:
        """The number of positions: those of padding have none in a pooled feature."""
        return len(self.flat if self.reads_zeros else self.read)

    def places(self, inverse: Places) -> Places:
        """The row of each position, from the row of each id in `read`."""
        if not self.reads_zeros:
            return inverse
        places = np.full(len(self.flat), -1, np.int32)
        places[self.real] = inverse
        return places


def _bounds(given: FeatureIds, count: int, where: str) -> Bounds:
    if given.offsets is None:
        samples, each = given.ids.shape
        return np.arange(samples + 1, dtype=np.int64) * each
    offsets = ids_of(given.offsets, f"{where}, offsets")
    return offsets if given.ends else np.append(offsets, count)


def checked_bounds(lookups: Sequence[FeatureLookup]) -> Bounds:
    """The bounds of all features, each among its own ids: a row for each feature."""
    first = lookups[0]
    for one in lookups:
        if len(one.bounds) != len(first.bounds):
            raise ConfigError(
                f"EmbeddingCollection: feature {one.name!r} has {len(one.bounds) - 1} samples, but "
                f"{first.name!r} has {len(first.bounds) - 1}; expected as many in all features: "
                "2-D ids have a row for each sample, and offsets have its start (with "
                "include_last_offset=True also the end of the last one)"
            )
    bounds = np.stack([one.bounds for one in lookups])
    wrong = p.wrong_bounds(bounds, np.array([len(one.flat) for one in lookups]))
    if len(wrong):
        one = lookups[wrong[0]]
        raise ConfigError(
            f"EmbeddingCollection: feature {one.name!r}: offsets must start at 0, never decrease, "
            f"and end at the number of ids, {len(one.flat)}; got "
            f"{np.array2string(one.bounds, threshold=8)}"
        )
    for row, one in zip(bounds, lookups, strict=True):
        if one.real is not None and one.is_pooled:
            row[:] = bounds_without(row, one.real)
    return bounds


@dataclasses.dataclass(frozen=True)
class TableLookup:
    """The features of one table."""

    lookups: Sequence[FeatureLookup]
    visit: Visit
    counts: Counts

    @property
    def layer(self) -> TableLayer:
        """The first of the layers that share the table."""
        return self.lookups[0].layer

    @property
    def places(self) -> Places:
        """The row of each position of all features."""
        if not any(one.reads_zeros for one in self.lookups):
            return self.visit.inverse
        ends = itertools.accumulate(len(one.read) for one in self.lookups[:-1])
        parts = np.split(self.visit.inverse, list(ends))
        places = [one.places(part) for one, part in zip(self.lookups, parts, strict=True)]
        return np.concatenate(places)

    def part(self, summed: Floats) -> TableGradients:
        """The gradient of the distinct rows."""
        return self.visit.part(summed, self.counts)


def visited(tables: Sequence[Sequence[FeatureLookup]]) -> list[TableLookup]:
    """Read the rows of all tables, with one request to each server."""
    asked = []
    for lookups in tables:
        layer = lookups[0].layer
        handle = layer.opened()
        for one in lookups:
            handle.reached(one.flat)
        ids = [one.read for one in lookups]
        asked.append((handle, ids[0] if len(ids) == 1 else np.concatenate(ids), layer.inserts()))
    visits = TableHandle.visit_all(asked)
    return [
        TableLookup(lookups, visit, lookups[0].layer.counts(visit, _given(lookups)))
        for lookups, visit in zip(tables, visits, strict=True)
    ]


def _given(lookups: Sequence[FeatureLookup]) -> Given:
    """Shows and clicks of all ids of a table; each feature has some, or none has."""
    given = [one.given for one in lookups]
    if all(show is None and click is None for show, click in given):
        return None, None
    # with clicks only, every id counts as shown
    shows = [
        np.ones(len(one.read), np.float32) if one.given[0] is None else one.given[0]
        for one in lookups
    ]
    clicks = [
        np.zeros(len(one.read), np.float32) if one.given[1] is None else one.given[1]
        for one in lookups
    ]
    return np.concatenate(shows), np.concatenate(clicks)


class JointLookup:
    """The rows of all features of a forward, and the places of their results.

    `columns` has the first column of each pooled feature in the tensor that they share.
    """

    def __init__(
        self, tables: Sequence[TableLookup], bounds: Bounds, columns: Mapping[str, int], width: int
    ) -> None:
        self.tables = tables
        self.lookups = [one for table in tables for one in table.lookups]
        rows = [table.visit.rows.reshape(-1) for table in tables]
        self.rows = rows[0] if len(rows) == 1 else np.concatenate(rows)
        #: the first number of each table in `rows`, and the end
        self.starts = [0, *itertools.accumulate(map(len, rows))]
        #: by result: its shape; first that of all pooled features
        self.shapes = [(bounds.shape[1] - 1, width)]
        layout = self._layout(columns, width)
        begins = [0, *itertools.accumulate(one.size for one in self.lookups[:-1])]
        self.pooling = p.Pooling(
            inverse=np.concatenate([table.places for table in tables]),
            bounds=bounds + np.array(begins)[:, None],
            weights=self._weights(),
            layout=layout,
            size=sum(rows * dim for rows, dim in self.shapes),
        )

    def _layout(self, columns: Mapping[str, int], width: int) -> Bounds:
        rows, free = [], self.shapes[0][0] * width
        for table, first in zip(self.tables, self.starts, strict=False):
            dim = table.layer.dim
            for one in table.lookups:
                at = columns[one.name] if one.is_pooled else free
                rows.append((first, dim, one.mode, at, width))
                if not one.is_pooled:
                    self.shapes.append((len(one.flat), dim))
                    free += len(one.flat) * dim
        return np.array(rows, np.int64)

    def _weights(self) -> Floats:
        """The weight of each position; empty if no feature has any."""
        if all(one.weights is None for one in self.lookups):
            return np.empty(0, np.float32)
        weights = [
            np.ones(one.size, np.float32) if one.weights is None else as_floats(one.weights)
            for one in self.lookups
        ]
        return np.concatenate(weights)

    def results(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled features side by side, and the rows of each id of the others."""
        inputs: list[Tensor] = [table.layer.weight for table in self.tables]
        inputs += [one.weights for one in self.lookups if one.weights is not None]
        with without_functions():
            pooled, *each = _Pool.apply(self, *inputs)  # type: ignore[no-untyped-call]
        names = [one.name for one in self.lookups if not one.is_pooled]
        return pooled, dict(zip(names, each, strict=True))

    def cut(self, array: Floats) -> list[Floats]:
        """The rows of each table in a flat array of all rows."""
        return [
            array[start:stop].reshape(-1, table.layer.dim)
            for table, (start, stop) in zip(
                self.tables, itertools.pairwise(self.starts), strict=True
            )
        ]


class _Pool(torch.autograd.Function):
    """Its inputs are the weights of the tables, then those of ids."""

    @staticmethod
    def forward(ctx: Any, joint: JointLookup, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.joint, ctx.inputs = joint, inputs
        out, ctx.chosen = p.pool(joint.rows, joint.pooling)
        ends = itertools.accumulate(rows * dim for rows, dim in joint.shapes[:-1])
        like = inputs[0]
        return tuple(
            torch.from_numpy(part.reshape(shape)).to(like.dtype)
            for part, shape in zip(np.split(out, list(ends)), joint.shapes, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        joint: JointLookup = ctx.joint
        arrays = [as_floats(gradient).reshape(-1) for gradient in gradients]
        flat = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        incoming = next((one for one in gradients if one.requires_grad), gradients[0])
        summed = p.spread(flat, joint.pooling, len(joint.rows), ctx.chosen)
        table_gradients = [
            accumulated(ctx, ctx.inputs[n], incoming, table.part(part), n)
            if ctx.needs_input_grad[1 + n]
            else None
            for n, (table, part) in enumerate(zip(joint.tables, joint.cut(summed), strict=True))
        ]
        return None, *table_gradients, *_weight_gradients(ctx, flat)


def _weight_gradients(ctx: Any, flat: Floats) -> list[Tensor | None]:
    """The gradients of per-sample weights."""
    joint: JointLookup = ctx.joint
    count = len(joint.tables)
    weights: Sequence[Tensor] = ctx.inputs[count:]
    if not any(ctx.needs_input_grad[1 + count :]):
        return [None] * len(weights)
    dots = p.position_grads(flat, joint.rows, joint.pooling)
    bounds = joint.pooling.bounds
    spans = [
        dots[bounds[n, 0] : bounds[n, -1]]
        for n, one in enumerate(joint.lookups)
        if one.weights is not None
    ]
    return [
        torch.from_numpy(span).to(weight.device, weight.dtype)
        for span, weight in zip(spans, weights, strict=True)
    ]
