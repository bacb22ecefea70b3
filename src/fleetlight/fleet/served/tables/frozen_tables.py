# SPDX-License-Identifier: Apache-2.0
"""Replaces layers whose rows are on servers by plain layers of torch, for inference."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.checkpoint import FolderTarget, TakenRows
from fleetlight.errors import ConfigError, PlanError, did_you_mean
from fleetlight.fleet.checkpoints.save_options import WORKER0
from fleetlight.fleet.job import Job, PlainLayer, Rows
from fleetlight.fleet.plan.remote_embedding import plain_layer
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.kernels import BUCKETS, Initializer, table_seed
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.frozen import FrozenRows, frozen
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.tables.table_file import WEIGHTS, Column, TableReader

#: for `rows`: the program has none, and reads published ones
READER = "reader"
#: ascending ids, and their rows
_Table = tuple[NDArray[np.int64], NDArray[np.float32]]


@contextlib.contextmanager
def open_tables(job: Job, session: ServerSession, rows: Rows) -> Iterator[PlainLayer]:
    """Inside the block: a function that makes a plain layer of torch from a layer with a table."""
    if session.is_open or job.group.alone:
        session.open(job)
    else:
        raise PlanError(
            "save_inference_model was called before the tables were open; call "
            "fleet.init_worker() on every worker first"
        )
    _check_rows(session, rows)
    session.communicator.flush()
    if session.bound.plan.pushes_alone:
        # the values of this worker may be older than the rows
        session.communicator.pull_dense()
    with _Tables(job, session, rows) as tables:
        yield tables.plain


class _Tables(contextlib.AbstractContextManager["_Tables"]):
    """The rows of all tables, in temporary files during the export."""

    def __init__(self, job: Job, session: ServerSession, rows: Rows) -> None:
        self._bound = session.bound
        self._rows = rows
        self._files = TableFiles(session.client, job.group.deadline_s)
        self._job = job
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-export-")
        self._frozen: dict[int, nn.Module] = {}
        self._by_table: dict[int, list[Path]] = {}

    def __enter__(self) -> _Tables:
        if self._rows == READER:
            return self
        # the servers write one checkpoint at a time
        self._job.background_save.finish()
        try:
            folder = Path(self._folder.name)
            saved, _ = self._files.save(FolderTarget(folder), WORKER0, self._job.step)
        finally:
            self._files.drop()
        for one in saved.values():
            for file in one.files:
                self._by_table.setdefault(file.table, []).append(folder / file.name)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def plain(self, layer: nn.Module) -> nn.Module:
        """A plain layer of torch with all rows."""
        if isinstance(layer, TableLayer):
            return self.frozen(layer).to(layer.weight.device)
        assert isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        if self._rows == READER:
            name = self._bound.plan.tables[self._number(layer)].name
            raise PlanError(
                f"save_inference_model: got rows={READER!r}, but table {name!r} is of a torch."
                f"nn.{type(layer).__name__}; use the layer of fleet.nn, such as "
                "fleet.nn.SparseEmbedding"
            )
        return plain_layer(layer, self.dense(layer))

    def frozen(self, layer: TableLayer) -> nn.Module:
        """A plain layer for a layer of `fleet.nn`; layers that share a table share its rows."""
        number = self._number(layer)
        if number not in self._frozen:
            self._frozen[number] = self._source(number)
        return frozen(layer, self._frozen[number])

    def _source(self, number: int) -> nn.Module:
        """The rows of a table, or the module that gets them from a reader."""
        plan = self._bound.plan.tables[number]
        if self._rows == READER:
            return TakenRows(plan.name, plan.dim)
        ids, rows = self._chosen(number, plan)
        how = plan.initializer
        return FrozenRows(
            _as_tensor(ids),
            _as_tensor(rows),
            table_seed(self._bound.plan.seed, plan.name),
            Initializer(how.kind, how.a, how.b),  # type: ignore[arg-type]  # it checks the kind
        )

    def dense(self, layer: nn.Module) -> Tensor:
        """The whole weight of a layer of torch whose rows are on servers."""
        return torch.from_numpy(self._read(self._number(layer))[1])

    def _number(self, layer: nn.Module) -> int:
        for number, layers in enumerate(self._bound.layers):
            if any(layer is other for other in layers):
                return number
        raise PlanError(
            f"save_inference_model: a {type(layer).__name__} of the model has no table in this "
            "job; export the registered model, or a part of it"
        )

    def _chosen(self, number: int, plan: TablePlan) -> _Table:
        ids, rows = self._read(number)
        if isinstance(self._rows, str) or plan.name not in self._rows:
            return ids, rows
        kept = np.isin(ids, self._rows[plan.name].reshape(-1).numpy())
        return ids[kept], rows[kept]

    def _read(self, number: int) -> _Table:
        dim = self._bound.plan.tables[number].dim
        blank, column = np.zeros(dim, np.float32), Column(WEIGHTS, 0, dim)
        readers = [TableReader(path) for path in self._by_table[number]]
        pieces = [
            piece
            for reader in readers
            for piece in reader.pieces(range(BUCKETS), [column], blank, 1 << 16)
        ]
        ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in pieces)])
        rows = np.concatenate([np.empty((0, dim), np.float32), *(rows for _, rows in pieces)])
        order = np.argsort(ids)
        return ids[order], rows[order]


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over the array; torch cannot export an empty one over NumPy's memory."""
    tensor = torch.from_numpy(array)
    return tensor if array.size else tensor.clone()


def _check_rows(session: ServerSession, rows: Rows) -> None:
    if isinstance(rows, str):
        if rows not in ("all", READER):
            raise ConfigError(
                f'save_inference_model: got rows={rows!r}, expected "all", "reader" or the ids to '
                'keep of each table by its name, such as rows={"emb": ids}'
            )
        return
    names = [table.name for table in session.bound.plan.tables]
    for name in rows:
        if name not in names:
            raise ConfigError(
                f"save_inference_model: rows has {name!r}, which is no table; "
                f"{did_you_mean(name, names)}"
            )
