# SPDX-License-Identifier: Apache-2.0
"""`ServerCheckpoint`: the servers' part of a checkpoint: tables, dense values, optimizer state."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import (
    Bases,
    FileTarget,
    HighWaterEntry,
    JobSnapshot,
    ModelState,
    OptimizerState,
    SavedBase,
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

#: a save with more of the bytes of all rows than this has all rows
_MAX_SHARE_OF_BASE = 0.5


@dataclasses.dataclass(frozen=True)
class _Cut:
    """What the servers have cut: all rows, or what changed since a base."""

    #: by this name the servers know what changes from now on
    name: str = ""
    base: SavedBase | None = None
    #: by table, if there is a base: all rows
    rows: Sequence[int] = ()


class ServerCheckpoint:
    """The values of all servers at one moment; worker 0 makes it while the others wait."""

    def __init__(
        self,
        job: Job,
        session: ServerSession,
        model: nn.Module,
        via: str,
        bases: Bases | None = None,
    ) -> None:
        """`bases`: None if this save has all rows, and no later one needs it."""
        self._bases = bases
        self._bound = session.bound
        self._client = session.client
        self._names = names_of(model)
        self._via = via
        self._step = job.step
        self._files = TableFiles(session.client, job.group.deadline_s)
        self._incarnations: list[int] = []
        self._dense = WholeState({}, {})
        self._cut = _Cut()

    def complete(self, snapshot: JobSnapshot) -> JobSnapshot:
        """Freeze the values of the servers, and add them to a worker's snapshot."""
        self._cut = self._take_cut()
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

    def _take_cut(self) -> _Cut:
        """Let all servers cut all rows, or what changed since the base if that is little."""
        if self._bases is None:
            self._ask_for_cut(m.SnapshotRequest())
            return _Cut()
        base, name = self._bases.next(), secrets.token_hex(8)
        known = "" if base is None else base.entry.name
        if base is not None and not base.is_due:
            taken = self._ask_for_cut(m.SnapshotRequest(name, known, delta=True))
            written = sum(one.written for one in taken)
            is_small = written <= _MAX_SHARE_OF_BASE * sum(one.bytes for one in taken)
            if is_small and all(one.is_delta for one in taken):
                rows = [sum(each) for each in zip(*(one.rows for one in taken), strict=True)]
                return _Cut("", base, rows)
        self._ask_for_cut(m.SnapshotRequest(name, known))
        return _Cut(name)

    def _ask_for_cut(self, message: m.SnapshotRequest) -> list[m.SnapshotTaken]:
        return list(self._files.ask_all(message, self._files.table_bytes()).values())

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
            self._check_parts(saved)
        marks = [
            HighWaterEntry(worker, started_at, server, sequence)
            for server, one in saved.items()
            for worker, started_at, sequence in one.marks
        ]
        tables = [self._entry(n, table, saved) for n, table in enumerate(self._bound.plan.tables)]
        base = None if self._cut.base is None else self._cut.base.entry
        return SavedTables(tables, files, marks, base, self._cut.name)

    def _check_parts(self, saved: Saved) -> None:
        """CheckpointError if a server that was restarted since the cut has saved all its rows."""
        for server, file in files_of(saved):
            if bool(file.part) != (self._cut.base is not None):
                raise CheckpointError(
                    f"server {server} was restarted after it had cut its tables for this save; "
                    "save again"
                )

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
            TableFileEntry(file.name, server, file.rows, file.buckets, file.part)
            for server, file in files_of(saved)
            if file.table == number
        ]
        rows = sum(file.rows for file in files)
        if self._cut.base is not None:
            files = [*self._cut.base.tables[table.name], *files]
            rows = self._cut.rows[number]
        entry = table.entry
        return TableEntry(
            name=table.name,
            dim=table.dim,
            rows=rows,
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
