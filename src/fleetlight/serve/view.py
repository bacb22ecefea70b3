# SPDX-License-Identifier: Apache-2.0
"""`ModelView`: the rows and dense values of one publication."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.kernels import Initializer, first_values, from_bfloat16, to_bfloat16
from fleetlight.kernels.arrays import as_ids, room
from fleetlight.kernels.rows.layered_rows import find_layered, read_layered
from fleetlight.publication.manifest import PublicationManifest, PublishedTable
from fleetlight.serve.layer_file import Layer

Rows = NDArray[np.float32]
#: ids that are looked up at a time: their row numbers stay in the cache of a core
_BLOCK = 4096
_NO_WORDS, _NO_ROWS = np.empty(0, np.int64), np.empty(0, np.float32)


class TableView:
    """The rows of one table."""

    def __init__(self, entry: PublishedTable, base: Layer, changed: Layer | None) -> None:
        self.entry = entry
        self._lower = base
        self._upper = changed
        kind, a, b = entry.initializer
        self._initializer = Initializer(kind, a, b)  # type: ignore[arg-type]  # it checks the kind

    def lookup(self, ids: ArrayLike, out: Rows | None = None) -> Rows:
        """The row of each id; an id without a row gets its first value, as in training."""
        flat = as_ids(ids)
        rows = room(out, (len(flat), self.entry.dim))
        for start in range(0, len(flat), _BLOCK):
            self._look_up(flat[start : start + _BLOCK], rows[start : start + _BLOCK])
        return rows

    def _look_up(self, ids: NDArray[np.int64], rows: Rows) -> None:
        numbers = np.empty(len(ids), np.int64)
        upper, lower = self._upper, self._lower
        if upper is None:
            find_layered(ids, _NO_WORDS, lower.slots, numbers)
            unknown = read_layered(lower.rows, _NO_ROWS, numbers, rows)
        else:
            find_layered(ids, upper.slots, lower.slots, numbers)
            unknown = read_layered(upper.rows, lower.rows, numbers, rows)
        if unknown:
            missing = numbers < 0
            rows[missing] = self._first(ids[missing])

    def _first(self, ids: NDArray[np.int64]) -> Rows:
        entry = self.entry
        values = first_values(ids, entry.dim, entry.seed, self._initializer)
        return from_bfloat16(to_bfloat16(values)) if entry.dtype == "bf16" else values


class ModelView:
    """One publication. It stays as it is, so that several lookups read the same model.

    Args:
        manifest: what is published; a `Reader` makes views.
        tables: the rows of each table.
        dense: the file of the dense values.

    Example:
        >>> from fleetlight.serve import Reader
        >>> fleet.init()
        >>> model = fleet.distributed_model(fleet.nn.SparseEmbedding(2, table="emb"))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = fleet.distributed_optimizer(optimizer)
        >>> fleet.init_worker()
        >>> _ = fleet.publish("published").publish_now()
        >>> with Reader("published", cache="cache") as reader:
        ...     reader.view.tables
        {'emb': 2}
    """

    def __init__(
        self, manifest: PublicationManifest, tables: Mapping[str, TableView], dense: Path
    ) -> None:
        self._manifest = manifest
        self._tables = dict(tables)
        # read now: the file may be gone when it is first used
        self._dense_bytes = dense.read_bytes()

    @property
    def number(self) -> int:
        """The number of the publication."""
        return self._manifest.newest.number

    @property
    def epoch(self) -> int:
        """Counts starts of publishers and loaded checkpoints."""
        return self._manifest.epoch

    @property
    def step(self) -> int:
        """The step of worker 0 at the publication."""
        return self._manifest.newest.step

    @property
    def time(self) -> float:
        """When the servers cut the rows, in seconds since 1970 by the clock of worker 0."""
        return self._manifest.newest.time

    @property
    def tables(self) -> dict[str, int]:
        """The number of values in a row of each table."""
        return {name: table.entry.dim for name, table in self._tables.items()}

    @functools.cached_property
    def dense(self) -> dict[str, NDArray[Any]]:
        """The dense values by name, without rows."""
        from safetensors.numpy import load

        return load(self._dense_bytes)

    def lookup(self, table: str, ids: ArrayLike, out: Rows | None = None) -> Rows:
        """The rows of ids of any shape, as float32 of the shape `[*ids.shape, dim]`.

        An id without a row gets its first value, as in training. `out` takes the rows of flat ids.
        """
        found = self._tables.get(table)
        if found is None:
            raise ConfigError(
                f"lookup: there is no table {table!r}; {did_you_mean(table, self._tables)}"
            )
        rows = found.lookup(ids, out)
        shape = np.shape(ids)
        return rows if len(shape) == 1 else rows.reshape(*shape, found.entry.dim)
