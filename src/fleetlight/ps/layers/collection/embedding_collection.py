# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingCollection`: many features in one call, with rows on the parameter servers.

Each feature has a `SparseEmbeddingBag` or a `SparseEmbedding`, and features that share a table
share one weight. So plans, checkpoints and exports contain ordinary layers of tables. Only the
forward is joint; programs and exported models call layer by layer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.kernels.ids.bags import Mode
from fleetlight.ps.layers.collection.feature_ids import (
    FeatureIds,
    Features,
    Numbers,
    feature_ids,
)
from fleetlight.ps.layers.collection.joint_lookup import (
    Bounds,
    FeatureLookup,
    JointLookup,
    Places,
    TableLookup,
    checked_bounds,
    visited,
)
from fleetlight.ps.layers.device_rows import TableRows, gathered, pooled, rows_on_device
from fleetlight.ps.layers.embedding import (
    CACHE_ROWS,
    COMBINERS,
    DEFAULT,
    Initializer,
    SparseEmbedding,
    SparseEmbeddingBag,
    TableLayer,
)
from fleetlight.ps.layers.entries import EntryPolicy
from fleetlight.ps.layers.staging import is_on_device, staging_of


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


@dataclasses.dataclass(frozen=True)
class EmbeddingFeature:
    """One feature of an `EmbeddingCollection`; without `table` it has a table of its own.

    Args:
        dim: the number of values in a row.
        table: the name of the table; features with the same name share its rows.
        combiner: `"sum"`, `"mean"` or `"max"` of the rows of a sample; None: a row for each id.
        initializer: the first values, as in `SparseEmbedding`.
        optimizer: the rule of the rows; by default that of the optimizer.
        entry: when a row is inserted or trained, as in `SparseEmbedding`.
        padding_idx: an id that counts in no bag.
        wire: how rows and gradients travel: `"fp32"`, `"bf16"`, `"fp16"` or `"int8"`.
        dtype: the type of the weights on servers: `"fp32"` or `"bf16"`.
        cache: `"device"` keeps rows in the memory of the worker's GPU.
        cache_rows: how many rows the cache keeps.
        memory: the bytes of rows that each server has in memory; None: all rows.
        max_rows: the most rows of the table in the job.
        evict: which rows leave a table with `max_rows` first.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> fleet.nn.EmbeddingFeature(8, table="items", combiner="mean").combiner
        'mean'
    """

    dim: int
    table: str | None = None
    #: None: a row for each id
    combiner: Mode | None = "sum"
    _: dataclasses.KW_ONLY
    initializer: Initializer = DEFAULT
    optimizer: str | None = None
    entry: EntryPolicy | None = None
    padding_idx: int | None = None
    wire: str | None = None
    dtype: str | None = None
    cache: str | None = None
    cache_rows: int = CACHE_ROWS
    memory: int | str | None = None
    max_rows: int | None = None
    evict: str | None = None

    def __post_init__(self) -> None:
        if self.combiner is not None and self.combiner not in COMBINERS:
            raise ConfigError(
                f"got combiner={self.combiner!r}, expected one of {COMBINERS} or None"
            )

    def layer(self, include_last_offset: bool) -> TableLayer:
        """The layer of this feature alone."""
        settings: dict[str, Any] = {
            "initializer": self.initializer,
            "optimizer": self.optimizer,
            "entry": self.entry,
            "padding_idx": self.padding_idx,
            "table": self.table,
            "wire": self.wire,
            "dtype": self.dtype,
            "cache": self.cache,
            "cache_rows": self.cache_rows,
            "memory": self.memory,
            "max_rows": self.max_rows,
            "evict": self.evict,
        }
        if self.combiner is None:
            return SparseEmbedding(self.dim, **settings)
        settings["include_last_offset"] = include_last_offset
        return SparseEmbeddingBag(self.dim, self.combiner, **settings)

    def table_settings(self) -> dict[str, object]:
        """The settings that features of one table have in common."""
        return {
            "dim": self.dim,
            "initializer": self.initializer,
            "optimizer": self.optimizer,
            "entry": self.entry and self.entry.plan,
            "wire": self.wire,
            "dtype": self.dtype,
            "cache": self.cache,
            "cache_rows": self.cache_rows,
            "memory": self.memory,
            "max_rows": self.max_rows,
            "evict": self.evict,
        }


class EmbeddingCollection(nn.Module):
    """Looks up many features at once: one request to each server, and one kernel for all.

    It takes the ids of each feature by name: 2-D ids, pairs of ids and offsets, nested tensors, or
    a KeyedJaggedTensor of torchrec. It returns the result of each feature by its name.

    Args:
        features: an `EmbeddingFeature` for each feature, or its arguments as a tuple.
        concatenated: all features are pooled, and the result is one tensor with their columns side
            by side, in the order of `features`.
        include_last_offset: True if offsets also have the end of the last bag.

    Raises:
        ConfigError: there are no features, two of one table differ, or `concatenated` meets one
            that is not pooled.

    Example:
        >>> fleet.init()
        >>> layer = fleet.nn.EmbeddingCollection({"user": (4,), "items": (2, None, "mean")})
        >>> model = fleet.distributed_model(layer)
        >>> found = model({"user": torch.tensor([[7]]), "items": torch.tensor([[1, 2]])})
        >>> found["user"].shape, found["items"].shape
        (torch.Size([1, 4]), torch.Size([1, 2]))
    """

    def __init__(
        self,
        features: Mapping[str, EmbeddingFeature | Sequence[Any]],
        *,
        concatenated: bool = False,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__()
        if not features:
            raise ConfigError("EmbeddingCollection: got no features, expected at least one")
        self.features = {name: _feature(name, given) for name, given in features.items()}
        self.concatenated = concatenated
        self.include_last_offset = include_last_offset
        #: the layers of the features
        self.layers = nn.ModuleDict()
        #: by feature: its name in `layers`
        self._keys: dict[str, str] = {}
        #: the features of each table
        self._tables: list[list[str]] = []
        self._add_layers()
        #: the first column of each pooled feature, and the number of columns
        self._columns: dict[str, int] = {}
        self._width = 0
        for name, feature in self.features.items():
            if feature.combiner is not None:
                self._columns[name] = self._width
                self._width += feature.dim
            elif concatenated:
                raise ConfigError(
                    f"EmbeddingCollection: feature {name!r} has combiner=None, but "
                    "concatenated=True needs one row for each sample; give it a combiner, or its "
                    "own collection"
                )

    def _add_layers(self) -> None:
        by_table: dict[str, list[str]] = {}
        for name, feature in self.features.items():
            key = _free_name(name, self.layers)
            self._keys[name] = key
            try:
                self.layers[key] = layer = feature.layer(self.include_last_offset)
            except ConfigError as error:
                raise ConfigError(f"EmbeddingCollection: feature {name!r}: {error}") from None
            if feature.table is None:
                self._tables.append([name])
                continue
            others = by_table.setdefault(feature.table, [])
            if others:
                _check_same(name, feature, others[0], self.features[others[0]])
                layer.weight = self[others[0]].weight
            else:
                self._tables.append(others)
            others.append(name)

    def __getitem__(self, feature: str) -> TableLayer:
        """The layer of a feature, such as for `fleet.rows(collection["user"], ids)`."""
        if feature not in self._keys:
            raise ConfigError(
                f"EmbeddingCollection: no feature {feature!r}; "
                f"{did_you_mean(feature, list(self._keys))}"
            )
        return self.layers[self._keys[feature]]  # type: ignore[return-value]

    def forward(
        self,
        features: Features,
        weights: Numbers = None,
        show: Numbers = None,
        click: Numbers = None,
    ) -> dict[str, Tensor] | Tensor:
        """The results of all features, from their ids by name.

        `features` is a dict of 2-D ids, pairs of ids and offsets, or nested tensors, or a
        KeyedJaggedTensor of torchrec. `weights`, `show` and `click` have a number for each id of
        some features.
        """
        given = self._given(features, weights, (show, click))
        layers = {name: self[name] for name in self.features}
        if any(not isinstance(one, TableLayer) or one.written for one in layers.values()):
            found = {name: self._alone(name, its) for name, its in given.items()}
            joined = torch.cat([found[name] for name in layers], 1) if self.concatenated else None
        else:
            joined, found = self._together(layers, given)
        if self.concatenated:
            assert joined is not None
            return joined
        return self._shaped(found, given)

    def _together(
        self, layers: Mapping[str, TableLayer], given: Mapping[str, FeatureIds]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled features as one tensor, and the results of all features."""
        tables = [
            [FeatureLookup(name, layers[name], given[name]) for name in names]
            for names in self._tables
        ]
        bounds = checked_bounds([one for lookups in tables for one in lookups])
        rows, columns = visited(tables), self._columns
        if any(is_on_device(layer.weight) for layer in layers.values()):
            pooled, found = device_results(rows, bounds, columns, self._width)
        else:
            pooled, found = JointLookup(rows, bounds, columns, self._width).results()
        if not self.concatenated:
            dims = [self.features[name].dim for name in self._columns]
            found.update(zip(self._columns, torch.split(pooled, dims, 1), strict=True))
        return pooled, found

    def _alone(self, name: str, given: FeatureIds) -> Tensor:
        """The result of one feature by its own layer, or by what replaces it."""
        layer: nn.Module = self[name]
        out: Tensor
        if self.features[name].combiner is None:
            out = layer(given.ids, show=given.show, click=given.click)
            return out
        offsets = given.offsets
        if offsets is not None and given.ends and not self.include_last_offset:
            offsets = offsets[:-1]
        out = layer(given.ids, offsets, given.weights, given.show, given.click)
        return out

    def _given(
        self, features: Features, weights: Numbers, counts: tuple[Numbers, Numbers]
    ) -> dict[str, FeatureIds]:
        given = feature_ids(features, self.features, self.include_last_offset, weights, counts)
        if counts != (None, None):
            self._check_counted(given)
        return given

    def _check_counted(self, given: Mapping[str, FeatureIds]) -> None:
        """ConfigError for a table of which some features have shows or clicks, and others none."""
        for names in self._tables:
            counted = [n for n in names if given[n].is_counted]
            without = [name for name in names if name not in counted]
            if counted and without:
                raise ConfigError(
                    f"EmbeddingCollection: feature {counted[0]!r} has show or click, but feature "
                    f"{without[0]!r} of the same table has neither; give them for both"
                )

    def _shaped(
        self, found: Mapping[str, Tensor], given: Mapping[str, FeatureIds]
    ) -> dict[str, Tensor]:
        """The results in the order of features; a row for each id has the form of the ids."""
        shaped = {}
        for name, feature in self.features.items():
            value, ids = found[name], given[name]
            if feature.combiner is None:
                if ids.is_nested:
                    value = torch.nested.nested_tensor_from_jagged(value, ids.offsets)
                else:
                    value = value.view(*ids.ids.shape, feature.dim)
            shaped[name] = value
        return shaped

    def ids_by_table(self, features: Features) -> dict[str, Tensor]:
        """The ids that a forward would look up, by table: for `fleet.shard(lookahead=...)`."""
        given = self._given(features, None, (None, None))
        return {
            self[names[0]].opened().plan.name: torch.cat([
                given[name].ids.reshape(-1).long() for name in names
            ])
            for names in self._tables
        }  # fmt: skip

    def extra_repr(self) -> str:
        """The arguments that `print(model)` shows."""
        return f"concatenated={self.concatenated}"


def _feature(name: str, given: EmbeddingFeature | Sequence[Any]) -> EmbeddingFeature:
    try:
        return given if isinstance(given, EmbeddingFeature) else EmbeddingFeature(*given)
    except (TypeError, ConfigError) as error:
        raise ConfigError(
            f"EmbeddingCollection: feature {name!r}: {error}; expected a "
            "fleet.nn.EmbeddingFeature or (dim, table, combiner)"
        ) from None


def _free_name(name: str, layers: nn.ModuleDict) -> str:
    """A name for a module that is neither used nor an attribute, such as `items`."""
    free = name.replace(".", "_") or "_"
    while free in layers or hasattr(layers, free):
        free += "_"
    return free


def _check_same(name: str, feature: EmbeddingFeature, other: str, its: EmbeddingFeature) -> None:
    """ConfigError for two features of one table that differ."""
    mine, theirs = feature.table_settings(), its.table_settings()
    for setting, value in mine.items():
        if value != theirs[setting]:
            raise ConfigError(
                f"EmbeddingCollection: features {other!r} and {name!r} share the table "
                f"{feature.table!r}, but have {setting}={theirs[setting]} and {value}; give both "
                "the same, or their own tables"
            )
