# SPDX-License-Identifier: Apache-2.0
"""`ServerCheckpoint`: the servers' part of a checkpoint: tables, dense values, optimizer state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import (
    FileTarget,
    HighWaterEntry,
    JobSnapshot,
    ModelState,
    OptimizerState,
    SavedTables,
    TableEntry,
    TableFileEntry,
)
from fleetlight.errors import CheckpointError, PeerLostError
from fleetlight.fleet.job import Job
from fleetlight.fleet.plan.bound_plan import BoundPlan
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.table_files import LANE, Saved, TableFiles, files_of
from fleetlight.fleet.training.registering import names_of
from fleetlight.ps import messages as m
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.tables.dense_state import DenseState, WholeState, tensor_of, whole


class ServerCheckpoint:
    """The values of all servers at one moment; worker 0 makes it while the others wait."""

    def __init__(self, job: Job, session: ServerSession, model: nn.Module, via: str) -> None:
        self._bound = session.bound
        self._client = session.client
        self._names = names_of(model)
        self._via = via
        self._step = job.step
        self._files = TableFiles(session.client, job.group.deadline_s)
        self._incarnations: list[int] = []
        self._dense = WholeState({}, {})

    def complete(self, snapshot: JobSnapshot) -> JobSnapshot:
        """Freeze the values of the servers, and add them to a worker's snapshot."""
        self._files.ask_all(m.SnapshotRequest(), self._files.table_bytes())
        self._incarnations = self._client.incarnations(LANE)
        self._dense = self._fetch()
        return dataclasses.replace(
            snapshot,
            model=self._model(snapshot.model),
            optimizers=[self._optimizer(n) for n in range(len(snapshot.optimizers))],
            server_num=self._client.server_num,
            epoch=self._client.epoch,
            save_tables=self._save_tables,
        )

    @property
    def can_retry(self) -> bool:
        """True when a lost server restarts, so that a second attempt may succeed."""
        return self._client.servers_restart

    @contextlib.contextmanager
    def _lost_with_its_server(self) -> Iterator[None]:
        """PeerLostError where an error comes from a restarted server, which has lost the save."""
        try:
            yield
        except CheckpointError as error:
            if self._client.incarnations(LANE) == self._incarnations:
                raise
            raise PeerLostError(f"a server was restarted during a save: {error}") from error

    def drop(self) -> None:
        """Free what was not saved."""
        self._files.drop()

    def _model(self, state: ModelState) -> ModelState:
        """A worker's model, with the servers' values."""
        plan = self._bound.plan
        values = {
            plan.dense[number].name: tensor_of(array).view(plan.dense[number].shape)
            for number, array in self._dense.values.items()
        }
        return dataclasses.replace(state, tensors={**state.tensors, **values})

    def _optimizer(self, number: int) -> OptimizerState:
        """An optimizer of a worker, with the servers' state of dense parameters."""
        bound, plan = self._bound, self._bound.plan
        optimizer = bound.optimizers[number]
        others = {id(parameter) for parameter in elsewhere(bound)}
        state: dict[Tensor, Mapping[str, Any]] = {
            parameter: values
            for parameter, values in optimizer.state.items()
            if id(parameter) not in others
        }
        for index, piece in self._dense.state.items():
            if plan.dense[index].optimizer == number and (piece.tensors or piece.scalars):
                state[bound.dense[index]] = piece.live(plan.dense[index].shape)
        return checkpoint.optimizer_state(optimizer, self._names, state)

    def _save_tables(self, target: FileTarget) -> SavedTables:
        """Let the servers write their tables."""
        with self._lost_with_its_server():
            saved, files = self._files.save(target, self._via, self._step)
        marks = [
            HighWaterEntry(worker, started_at, server, sequence)
            for server, one in saved.items()
            for worker, started_at, sequence in one.marks
        ]
        tables = [self._entry(n, table, saved) for n, table in enumerate(self._bound.plan.tables)]
        return SavedTables(tables, files, marks)

    def _fetch(self) -> WholeState:
        placement = self._client.placement
        replies = self._client.everywhere(m.FetchDense())
        states = []
        for server in range(self._client.server_num):
            message, arrays = replies[server].message, replies[server].arrays
            assert isinstance(message, m.FetchedDense), message
            blocks = len(placement.blocks_of(server))
            states.append(
                DenseState(arrays[:blocks], message.state, message.scalars, arrays[blocks:])
            )
        return whole(self._bound.plan, placement, states)

    def _entry(self, number: int, table: TablePlan, saved: Saved) -> TableEntry:
        files = [
            TableFileEntry(file.name, server, file.rows, file.buckets)
            for server, file in files_of(saved)
            if file.table == number
        ]
        entry = table.entry
        return TableEntry(
            name=table.name,
            dim=table.dim,
            rows=sum(file.rows for file in files),
            rule="add" if self._bound.plan.exchanges_differences else table.rule.name,
            options=dict(table.rule.options),
            initializer=(table.initializer.kind, table.initializer.a, table.initializer.b),
            entry=None if entry is None else (entry.kind, entry.value),
            ids=table.rows,
            weights=list(dict.fromkeys(self._names[w] for w in self._bound.weights(number))),
            files=files,
        )


def elsewhere(bound: BoundPlan) -> list[nn.Parameter]:
    """The parameters whose optimizer state is not in this worker's optimizers."""
    plan = bound.plan
    return table_weights(bound) + (bound.dense if plan.steps_together and plan.serves_dense else [])


def table_weights(bound: BoundPlan) -> list[nn.Parameter]:
    """The weights in the model that stand for tables."""
    return [weight for number in range(len(bound.layers)) for weight in bound.weights(number)]
