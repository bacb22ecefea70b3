# SPDX-License-Identifier: Apache-2.0
"""The lookup of many features on a device: tables of one dim share a tensor of rows there.

Features of one dim and one combiner are pooled by one operation of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetlight.kernels.ids.bags import Mode
from fleetlight.ps.layers.collection.joint_lookup import (
    Bounds,
    FeatureLookup,
    Places,
    TableLookup,
)
from fleetlight.ps.layers.device_rows import TableRows, gathered, pooled, rows_on_device
from fleetlight.ps.layers.embedding import SparseEmbeddingBag
from fleetlight.ps.layers.staging import staging_of


class _Feature(NamedTuple):
    """A feature, the rows of its dim, and the row of each position."""

    lookup: FeatureLookup
    rows: Tensor
    #: -1 where padding reads zeros
    places: Places
    bounds: Bounds

    @property
    def form(self) -> tuple[int, Mode, bool]:
        """Equal for features that are pooled together."""
        layer = self.lookup.layer
        assert isinstance(layer, SparseEmbeddingBag)
        return layer.dim, layer.combiner, self.lookup.weights is not None


def device_results(
    tables: Sequence[TableLookup], bounds: Bounds, columns: Mapping[str, int], width: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The results of `JointLookup`, from layers on a device."""
    weight = tables[0].layer.weight
    features = list(_features(tables, bounds))
    each = {
        one.lookup.name: _each(one).to(weight.dtype) for one in features if not one.lookup.is_pooled
    }
    of_bags = [one for one in features if one.lookup.is_pooled]
    if not of_bags:
        return weight.new_empty(bounds.shape[1] - 1, width), each
    return _side_by_side(of_bags, columns).to(weight.dtype), each


def _features(tables: Sequence[TableLookup], bounds: Bounds) -> Iterator[_Feature]:
    """The features, with their rows on the device."""
    lookups = [one for table in tables for one in table.lookups]
    of_feature = {one.name: its for one, its in zip(lookups, bounds, strict=True)}
    for group in _by_dim(tables):
        rows = rows_on_device(
            [table.layer.weight for table in group],
            [TableRows(table.visit, table.counts) for table in group],
        )
        first = 0
        for table in group:
            ends = itertools.accumulate(one.size for one in table.lookups[:-1])
            parts = np.split(table.places, list(ends))
            for one, places in zip(table.lookups, parts, strict=True):
                moved = np.where(places < 0, places, places + np.int32(first))
                yield _Feature(one, rows, moved, of_feature[one.name])
            first += len(table.visit.wanted.ids)


def _by_dim(tables: Iterable[TableLookup]) -> Iterable[list[TableLookup]]:
    found: dict[int, list[TableLookup]] = {}
    for table in tables:
        found.setdefault(table.layer.dim, []).append(table)
    return found.values()


def _each(one: _Feature) -> Tensor:
    """A row for each id of a feature; that of padding is zero."""
    if not one.lookup.reads_zeros:
        return gathered(one.rows, one.places)
    real = np.flatnonzero(one.places >= 0)
    found = gathered(one.rows, one.places[real])
    zeros = one.rows.new_zeros(len(one.places), one.rows.shape[1])
    return zeros.index_copy(0, staging_of(zeros.device).to_device(real), found)


def _side_by_side(features: Sequence[_Feature], columns: Mapping[str, int]) -> Tensor:
    """The pooled features, in the order of their columns."""
    by_form: dict[tuple[int, Mode, bool], list[_Feature]] = {}
    for one in sorted(features, key=lambda one: columns[one.lookup.name]):
        by_form.setdefault(one.form, []).append(one)
    parts = [_pooled(some, mode) for (_, mode, _), some in by_form.items()]
    if len(parts) == 1:
        return parts[0]
    columns_of = [
        np.arange(columns[one.lookup.name], columns[one.lookup.name] + dim)
        for (dim, _, _), some in by_form.items()
        for one in some
    ]
    order = np.argsort(np.concatenate(columns_of)).astype(np.int32)
    joined = torch.cat(parts, 1)
    return joined.index_select(1, staging_of(joined.device).to_device(order))


def _pooled(features: Sequence[_Feature], mode: Mode) -> Tensor:
    """Features of one form: a row for each sample, with their columns side by side."""
    sizes = [len(one.places) for one in features]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    bounds = [one.bounds[:-1] + start for one, start in zip(features, starts, strict=True)]
    weights = [one.lookup.weights for one in features if one.lookup.weights is not None]
    rows = features[0].rows
    bags = pooled(
        rows,
        np.concatenate([one.places for one in features]),
        np.concatenate([*bounds, [sum(sizes)]]),
        mode,
        torch.cat([weight.to(rows.device, rows.dtype) for weight in weights]) if weights else None,
    )
    samples, dim = len(features[0].bounds) - 1, rows.shape[1]
    by_sample = bags.view(len(features), samples, dim).transpose(0, 1)
    return by_sample.reshape(samples, len(features) * dim)
