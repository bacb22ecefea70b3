# SPDX-License-Identifier: Apache-2.0
"""`LocalValues` and `ServedValues`: all values of a registered model, wherever they are kept."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import ModelState, Snapshot
from fleetlight.errors import CheckpointError
from fleetlight.fleet.served.tables.server_checkpoint import ServedCut, table_weights
from fleetlight.fleet.served.tables.table_files import WORKER0
from fleetlight.fleet.training.registered import registered_model
from fleetlight.ps.plan import SYNC
from fleetlight.ps.worker.client import Client

if TYPE_CHECKING:
    from fleetlight.fleet.context import Context
    from fleetlight.fleet.served.session import Session

#: of rows in one message to a server
_PIECE_BYTES = 32 << 20

State = Mapping[str, Any]


class ModelValues(Protocol):
    """All values of one registered model, by the names that the model has for them."""

    def row_bytes(self) -> int:
        """Bytes of ids and rows that are elsewhere."""

    def gathered(self) -> dict[str, Any]:
        """Copies of all values, on the CPU; worker 0 asks."""

    def fitted(self, state: State) -> Iterator[Callable[[], None]]:
        """Compare everything; the steps that then put it in place, on worker 0."""

    def held_here(self) -> list[Tensor]:
        """What every worker keeps itself."""

    def taken(self, operation: str) -> None:
        """After a load: wait until all workers have taken the values, where they must."""


class _Names:
    """A registered model among all of them."""

    def __init__(self, context: Context, model: nn.Module) -> None:
        self.whole = registered_model(context)
        numbers = [n for n, plan in enumerate(context.models) if plan.module is model]
        self._prefix = f"{numbers[0]}." if len(context.models) > 1 else ""

    def local(self, values: State) -> dict[str, Any]:
        """Those of the model, by the names it has for them."""
        size = len(self._prefix)
        return {n[size:]: v for n, v in values.items() if n.startswith(self._prefix)}

    def named(self, rows: State) -> dict[str, Any]:
        """Tables by the names that the model has for them."""
        return {name.removeprefix(self._prefix): value for name, value in rows.items()}

    def table(self, name: str) -> str:
        """What ids and rows of a table stand under."""
        return name.removeprefix(self._prefix)


class LocalValues:
    """This worker has them all."""

    def __init__(self, context: Context, model: nn.Module) -> None:
        self._names, self._model = _Names(context, model), model

    def row_bytes(self) -> int:
        """As in `ModelValues`."""
        return 0

    def gathered(self) -> dict[str, Any]:
        """As in `ModelValues`."""
        state = checkpoint.model_state(self._names.whole)
        return self._names.local(_copied(state).state_dict())

    def fitted(self, state: State) -> Iterator[Callable[[], None]]:
        """As in `ModelValues`."""
        yield _fitted(self._model, dict(state))

    def held_here(self) -> list[Tensor]:
        """As in `ModelValues`."""
        return _tensors(self._model, set())

    def taken(self, operation: str) -> None:
        """Every step is made together."""


class ServedValues:
    """Servers have the rows of tables and, mostly, the dense values."""

    def __init__(self, context: Context, session: Session, model: nn.Module) -> None:
        self._names, self._model = _Names(context, model), model
        self._context, self._session = context, session
        inside = {id(module) for module in model.modules()}
        layers = enumerate(session.drawn.layers)
        #: the numbers of its tables in the plan
        self._tables = [n for n, some in layers if any(id(one) in inside for one in some)]

    def row_bytes(self) -> int:
        """As in `ModelValues`."""
        plans = [self._session.drawn.plan.tables[number] for number in self._tables]
        counted = self._session.client.figures()
        return sum(one.rows[t.name] * (8 + 4 * t.dim) for one in counted for t in plans)

    def gathered(self) -> dict[str, Any]:
        """As in `ModelValues`."""
        state = checkpoint.model_state(self._names.whole)
        # the servers write one thing at a time
        self._context.saving.finish()
        cut = ServedCut(self._context, self._session, self._names.whole, WORKER0)
        try:
            made = cut.completed(Snapshot(model=state))
            with tempfile.TemporaryDirectory(prefix="fleet-state-") as folder:
                assert made.save_tables is not None
                saved = made.save_tables(Path(folder))
                entries = [saved.tables[number] for number in self._tables]
                rows = checkpoint.tables_in(Path(folder), entries)
        finally:
            cut.drop()
        dense = self._without_tables(_copied(made.model).state_dict())
        tied = {name: rows[first] for name, first in state.aliases.items() if first in rows}
        return {**self._names.local({**dense, **tied}), **self._names.named(rows)}

    def _without_tables(self, values: State) -> dict[str, Any]:
        """Without what stands for tables, which has no elements."""
        weights = {id(weight) for weight in table_weights(self._session.drawn)}
        live = self._names.whole.state_dict(keep_vars=True)
        return {name: v for name, v in values.items() if id(live[name]) not in weights}

    def fitted(self, state: State) -> Iterator[Callable[[], None]]:
        """As in `ModelValues`."""
        session, values = self._session, dict(state)
        weights = {id(weight) for weight in table_weights(session.drawn)}
        live = self._model.state_dict(keep_vars=True)
        tables = {number: self._rows_of(number, values) for number in self._tables}
        values |= {name: weight for name, weight in live.items() if id(weight) in weights}
        # the servers' values may be newer than those here
        yield session.communicator.take_dense
        yield _fitted(self._model, values)
        for number, (ids, rows) in tables.items():
            yield functools.partial(_refill, session.client, number, ids, rows)
        if session.drawn.plan.serves_dense:
            yield functools.partial(session.client.refill_dense, session.live)

    def held_here(self) -> list[Tensor]:
        """As in `ModelValues`."""
        drawn = self._session.drawn
        kept = drawn.dense if drawn.plan.serves_dense else []
        return _tensors(self._model, {id(t) for t in (*table_weights(drawn), *kept)})

    def taken(self, operation: str) -> None:
        """Nobody pushes before all have taken the values: they would not be the same."""
        if self._session.drawn.plan.mode != SYNC:
            self._context.group.barrier(operation)

    def _rows_of(self, number: int, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Ids and rows of a table, taken out of a state."""
        plan = self._session.drawn.plan.tables[number]
        name = self._names.table(plan.name)
        rows = values.pop(f"{name}.weight", None)
        ids = torch.arange(plan.rows) if plan.rows else values.pop(f"{name}.ids", None)
        if not isinstance(ids, Tensor) or not isinstance(rows, Tensor):
            raise CheckpointError(
                f"fleet.load_state_dict: the state has no rows of table {name!r}; a model's own "
                "state_dict() has none: take it by fleet.state_dict(model)"
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


def _fitted(model: nn.Module, values: dict[str, Any]) -> Callable[[], None]:
    return checkpoint.fitted_model_state(
        model, ModelState(values, dict.fromkeys(values, "parameter"))
    )


def _tensors(model: nn.Module, elsewhere: set[int]) -> list[Tensor]:
    tensors = (*model.parameters(), *model.buffers())
    return [t.detach() for t in tensors if id(t) not in elsewhere and t.numel()]


def _copied(state: ModelState) -> ModelState:
    copies = {name: tensor.detach().cpu().clone() for name, tensor in state.tensors.items()}
    return dataclasses.replace(state, tensors=copies)


def _refill(client: Client, number: int, ids: Tensor, rows: Tensor) -> None:
    """Rows in pieces; with the first, all others go back to their first values."""
    size = max(1, _PIECE_BYTES // (8 + 4 * rows.shape[1]))
    for start in range(0, max(1, len(ids)), size):
        piece = slice(start, start + size)
        client.refill(number, ids[piece].numpy(), rows[piece].numpy(), reset=not start)
