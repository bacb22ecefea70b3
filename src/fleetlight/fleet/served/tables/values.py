# SPDX-License-Identifier: Apache-2.0
"""`ServedValues`: all values of a registered model whose tables are on servers."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import FolderTarget, JobSnapshot
from fleetlight.errors import CheckpointError
from fleetlight.fleet.checkpoints.model_values import (
    ModelNames,
    State,
    copied,
    prepare_values,
    tensors_of,
)
from fleetlight.fleet.checkpoints.save_options import WORKER0
from fleetlight.fleet.job import Job
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.server_checkpoint import ServerCheckpoint, table_weights
from fleetlight.ps.worker.client import Client

#: bytes of rows in one message to a server
_PIECE_BYTES = 32 << 20


class ServedValues:
    """The values of a model whose rows, and mostly dense values, are on servers."""

    def __init__(self, job: Job, session: ServerSession, model: nn.Module) -> None:
        self._names, self._model = ModelNames(job, model), model
        self._job, self._session = job, session
        inside = {id(module) for module in model.modules()}
        layers = enumerate(session.bound.layers)
        #: the numbers of its tables in the plan
        self._tables = [n for n, some in layers if any(id(one) in inside for one in some)]

    def row_bytes(self) -> int:
        plans = [self._session.bound.plan.tables[number] for number in self._tables]
        counted = self._session.client.metrics()
        return sum(one.rows[t.name] * (8 + 4 * t.dim) for one in counted for t in plans)

    def gather(self) -> dict[str, Any]:
        state = checkpoint.model_state(self._names.whole)
        # the servers write one checkpoint at a time
        self._job.background_save.finish()
        cut = ServerCheckpoint(self._job, self._session, self._names.whole, WORKER0)
        try:
            made = cut.complete(JobSnapshot(model=state))
            with tempfile.TemporaryDirectory(prefix="fleet-state-") as folder:
                assert made.save_tables is not None
                saved = made.save_tables(FolderTarget(Path(folder)))
                entries = [saved.tables[number] for number in self._tables]
                rows = checkpoint.read_tables(Path(folder), entries)
        finally:
            cut.drop()
        dense = self._without_tables(copied(made.model).state_dict())
        tied = {name: rows[first] for name, first in state.aliases.items() if first in rows}
        return {**self._names.local({**dense, **tied}), **self._names.named(rows)}

    def _without_tables(self, values: State) -> dict[str, Any]:
        """Without the weights that stand for tables, which have no elements."""
        weights = {id(weight) for weight in table_weights(self._session.bound)}
        live = self._names.whole.state_dict(keep_vars=True)
        return {name: v for name, v in values.items() if id(live[name]) not in weights}

    def prepare(self, state: State) -> Iterator[Callable[[], None]]:
        session, values = self._session, dict(state)
        weights = {id(weight) for weight in table_weights(session.bound)}
        live = self._model.state_dict(keep_vars=True)
        tables = {number: self._rows_of(number, values) for number in self._tables}
        values |= {name: weight for name, weight in live.items() if id(weight) in weights}
        # the values of the servers may be newer than those of this worker
        yield session.communicator.pull_dense
        yield prepare_values(self._model, values)
        for number, (ids, rows) in tables.items():
            yield functools.partial(_refill, session.client, number, ids, rows)
        if session.bound.plan.serves_dense:
            yield functools.partial(session.client.refill_dense, session.local_parameters)

    def local_tensors(self) -> list[Tensor]:
        bound = self._session.bound
        kept = bound.dense if bound.plan.serves_dense else []
        return tensors_of(self._model, {id(t) for t in (*table_weights(bound), *kept)})

    def wait_until_applied(self, operation: str) -> None:
        # a push before all workers have the values would make them differ
        if not self._session.bound.plan.steps_together:
            self._job.group.barrier(operation)

    def _rows_of(self, number: int, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Ids and rows of a table, taken out of a state."""
        plan = self._session.bound.plan.tables[number]
        name = self._names.table(plan.name)
        rows = values.pop(f"{name}.weight", None)
        ids = torch.arange(plan.rows) if plan.rows else values.pop(f"{name}.ids", None)
        if not isinstance(ids, Tensor) or not isinstance(rows, Tensor):
            raise CheckpointError(
                f"fleet.load_state_dict: the state has no rows of table {name!r}; a model's own "
                "state_dict() has none: make the state with fleet.state_dict(model)"
            )
        if ids.dtype != torch.int64 or tuple(rows.shape) != (len(ids), plan.dim):
            raise CheckpointError(
                f"fleet.load_state_dict: table {name!r} has {ids.dtype} ids of shape "
                f"{list(ids.shape)} and rows of shape {list(rows.shape)}, expected torch.int64 and "
                f"[{plan.rows or len(ids)}, {plan.dim}]"
            )
        ids, order = ids.cpu().sort()
        if (ids[1:] == ids[:-1]).any():
            raise CheckpointError(f"fleet.load_state_dict: table {name!r} has an id twice")
        return ids, rows.detach().cpu().float()[order]


def _refill(client: Client, number: int, ids: Tensor, rows: Tensor) -> None:
    """Send rows in pieces; the first one resets all other rows to their first values."""
    size = max(1, _PIECE_BYTES // (8 + 4 * rows.shape[1]))
    for start in range(0, max(1, len(ids)), size):
        piece = slice(start, start + size)
        client.refill(number, ids[piece].numpy(), rows[piece].numpy(), reset=not start)
