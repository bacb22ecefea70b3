# SPDX-License-Identifier: Apache-2.0
"""Layers of torch alone in place of those whose rows are on servers, for inference."""

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

from fleetlight.errors import ConfigError, PlanError, did_you_mean
from fleetlight.fleet.checkpoints.checkpoint_copy import WORKER0
from fleetlight.fleet.job import Job, Rows, StandIn
from fleetlight.fleet.plan.remote_embedding import plain_layer
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.kernels import BUCKETS, Initializer, table_seed
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.frozen import FrozenRows, frozen
from fleetlight.ps.plan import ASYNC, TablePlan
from fleetlight.ps.tables.table_file import WEIGHTS, Column, TableReader

#: ids, ascending, and their rows
_Table = tuple[NDArray[np.int64], NDArray[np.float32]]


@contextlib.contextmanager
def open_tables(job: Job, session: ServerSession, rows: Rows) -> Iterator[StandIn]:
    """Inside the block, a function that gives layers of torch alone for layers with tables."""
    if session.is_open or job.group.alone:
        session.open(job)
    else:
        raise PlanError(
            "save_inference_model came before the tables were open; call fleet.init_worker() on "
            "every worker before"
        )
    _check_rows(session, rows)
    session.communicator.flush()
    if session.drawn.plan.mode == ASYNC:
        # what this worker has may be older than the rows
        session.communicator.take_dense()
    with _Tables(job, session, rows) as tables:
        yield tables.stand_in


class _Tables(contextlib.AbstractContextManager["_Tables"]):
    """The rows of all tables, in files of this process while the model is exported."""

    def __init__(self, job: Job, session: ServerSession, rows: Rows) -> None:
        self._drawn = session.drawn
        self._rows = rows
        self._files = TableFiles(session.client, job.group.deadline_s)
        self._job = job
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-export-")
        self._frozen: dict[int, FrozenRows] = {}
        self._by_table: dict[int, list[Path]] = {}

    def __enter__(self) -> _Tables:
        # the servers write one thing at a time
        self._job.saving.finish()
        try:
            folder = Path(self._folder.name)
            saved, _ = self._files.save(folder, WORKER0, self._job.step)
        finally:
            self._files.drop()
        for one in saved.values():
            for file in one.files:
                self._by_table.setdefault(file.table, []).append(folder / file.name)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def stand_in(self, layer: nn.Module) -> nn.Module:
        """A layer of torch alone."""
        if isinstance(layer, TableLayer):
            return self.frozen(layer).to(layer.weight.device)
        assert isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        return plain_layer(layer, self.dense(layer))

    def frozen(self, layer: TableLayer) -> nn.Module:
        """What stands in for a layer; layers that share a table share its rows."""
        number = self._number(layer)
        if number not in self._frozen:
            plan = self._drawn.plan.tables[number]
            ids, rows = self._chosen(number, plan)
            how = plan.initializer
            self._frozen[number] = FrozenRows(
                _as_tensor(ids),
                _as_tensor(rows),
                table_seed(self._drawn.plan.seed, plan.name),
                Initializer(how.kind, how.a, how.b),  # type: ignore[arg-type]  # it looks itself
            )
        return frozen(layer, self._frozen[number])

    def dense(self, layer: nn.Module) -> Tensor:
        """The whole weight of a layer of torch that was moved onto a table."""
        return torch.from_numpy(self._read(self._number(layer))[1])

    def _number(self, layer: nn.Module) -> int:
        for number, layers in enumerate(self._drawn.layers):
            if any(layer is other for other in layers):
                return number
        raise PlanError(
            f"save_inference_model: a {type(layer).__name__} of the model belongs to no table of "
            "this job; export the registered model, or a part of it"
        )

    def _chosen(self, number: int, plan: TablePlan) -> _Table:
        ids, rows = self._read(number)
        if isinstance(self._rows, str) or plan.name not in self._rows:
            return ids, rows
        kept = np.isin(ids, self._rows[plan.name].reshape(-1).numpy())
        return ids[kept], rows[kept]

    def _read(self, number: int) -> _Table:
        dim = self._drawn.plan.tables[number].dim
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
    """Without a copy, but torch cannot export a tensor of no elements over NumPy's memory."""
    tensor = torch.from_numpy(array)
    return tensor if array.size else tensor.clone()


def _check_rows(session: ServerSession, rows: Rows) -> None:
    if isinstance(rows, str):
        if rows != "all":
            raise ConfigError(
                f'save_inference_model: got rows={rows!r}, expected "all" or the ids to keep of '
                'each table by its name, such as rows={"emb": ids}'
            )
        return
    names = [table.name for table in session.drawn.plan.tables]
    for name in rows:
        if name not in names:
            raise ConfigError(
                f"save_inference_model: rows has {name!r}, which is no table; "
                f"{did_you_mean(name, names)}"
            )
