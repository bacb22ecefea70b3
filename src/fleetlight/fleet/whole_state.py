# SPDX-License-Identifier: Apache-2.0
"""`fleet.state_dict` and `fleet.load_state_dict`: all values of a model, wherever they are kept."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import ModelState, Snapshot
from fleetlight.errors import CheckpointError, ComebackError, PlanError
from fleetlight.fleet import averaging, extra_state
from fleetlight.fleet.context import Context, current
from fleetlight.fleet.registered import names_of, refuse_in_server, registered_model
from fleetlight.fleet.served_saving import table_weights
from fleetlight.fleet.table_files import WORKER0
from fleetlight.ps.plan import SYNC
from fleetlight.ps.worker.client import Client

#: of a state that worker 0 holds in memory, unless it is told otherwise
MAX_BYTES = 4 << 30
#: of rows in one message to a server
_PIECE_BYTES = 32 << 20

State = Mapping[str, Any]


def state_dict(model: nn.Module, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """All values of a registered model, on worker 0; the other workers get an empty dict.

    Every worker calls it, behind the same step. Names are those of `model.state_dict()`. A table
    of `fleet.nn` becomes `<table>.ids`, ascending, and `<table>.weight`, their rows; a layer of
    torch whose rows are on servers has its whole weight. The tensors are copies, on the CPU.
    Optimizers are not part of it: `fleet.save_persistables` saves them, too.
    """
    return _taken_in(_checked(model, "state_dict"), model, max_bytes=max_bytes)


def _taken_in(context: Context, model: nn.Module, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The same in a given context."""
    found: dict[str, Any] = {}

    def gather() -> None:
        found.update(_gathered(context, model, max_bytes))

    is_first = context.group.index == 0
    with context.at_rest():
        context.group.assemble("fleet.state_dict")
        averaging.settle(context, "fleet.state_dict")
        context.group.together(gather if is_first else None, "fleet.state_dict")
    if is_first and not found:
        raise ComebackError(
            "this worker was started again, and what fleet.state_dict gave it before is gone; keep "
            "values that a later start needs by fleet.save_persistables(dirname)"
        )
    return found


def load_state_dict(model: nn.Module, state: State) -> None:
    """Give all workers and servers the values of a state, that of worker 0.

    Every worker calls it. Nothing changes where the state does not fit. Rows that are not in it go
    back to their first values. Optimizers stay as they are, what rules remember of rows included.
    """
    _put_into(_checked(model, "load_state_dict"), model, state)


def _put_into(context: Context, model: nn.Module, state: State) -> None:
    """The same in a given context."""
    context.open()

    def load() -> list[bytes]:
        if context.recovery is not None:
            context.recovery.give_up("it was about to load a state, or had just done")
        _load(context, model, state)
        return []

    context.once("fleet.load_state_dict", load)


def _checked(model: nn.Module, name: str) -> Context:
    context = current()
    refuse_in_server(context, name)
    if not any(plan.module is model for plan in context.models):
        raise PlanError(
            f"fleet.{name}: the model is no registered one; give the module that "
            "fleet.distributed_model returned, or program.model"
        )
    return context


# -- out of the job


def _gathered(context: Context, model: nn.Module, max_bytes: int) -> dict[str, Any]:
    scope = _Scope(context, model)
    state = checkpoint.model_state(scope.whole)
    _refuse_large(_nbytes(model) + scope.row_bytes(), max_bytes)
    cut = context.cut(scope.whole, WORKER0)
    if cut is None:
        return scope.local(_copied(state).state_dict())
    try:
        made = cut.completed(Snapshot(model=state))
        with tempfile.TemporaryDirectory(prefix="fleet-state-") as folder:
            assert made.save_tables is not None
            saved = made.save_tables(Path(folder))
            entries = [saved.tables[number] for number in scope.tables]
            rows = checkpoint.tables_in(Path(folder), entries)
    finally:
        cut.drop()
    dense = scope.without_tables(_copied(made.model).state_dict())
    tied = {name: rows[first] for name, first in state.aliases.items() if first in rows}
    return {**scope.local({**dense, **tied}), **scope.named(rows)}


class _Scope:
    """A registered model among all of them, and its tables."""

    def __init__(self, context: Context, model: nn.Module) -> None:
        self.whole = registered_model(context)
        self.session = context.session
        numbers = [n for n, plan in enumerate(context.models) if plan.module is model]
        self._prefix = f"{numbers[0]}." if len(context.models) > 1 else ""
        inside = {id(module) for module in model.modules()}
        layers = [] if self.session is None else self.session.drawn.layers
        #: the numbers of its tables in the plan
        self.tables = [n for n, some in enumerate(layers) if any(id(s) in inside for s in some)]

    def row_bytes(self) -> int:
        """Bytes of ids and rows."""
        if self.session is None:
            return 0
        plans = [self.session.drawn.plan.tables[number] for number in self.tables]
        counted = self.session.client.figures()
        return sum(one.rows[t.name] * (8 + 4 * t.dim) for one in counted for t in plans)

    def without_tables(self, values: State) -> dict[str, Any]:
        """Without what stands for tables, which has no elements."""
        assert self.session is not None
        weights = {id(weight) for weight in table_weights(self.session.drawn)}
        live = self.whole.state_dict(keep_vars=True)
        return {name: v for name, v in values.items() if id(live[name]) not in weights}

    def local(self, values: State) -> dict[str, Any]:
        """Those of the model, by the names it has for them."""
        size = len(self._prefix)
        return {n[size:]: v for n, v in values.items() if n.startswith(self._prefix)}

    def named(self, rows: State) -> dict[str, Any]:
        """Tables by the names that the model has for them."""
        return {name.removeprefix(self._prefix): value for name, value in rows.items()}

    def table_name(self, number: int) -> str:
        """What its ids and rows stand under."""
        assert self.session is not None
        return self.session.drawn.plan.tables[number].name.removeprefix(self._prefix)


def _copied(state: ModelState) -> ModelState:
    copies = {name: tensor.detach().cpu().clone() for name, tensor in state.tensors.items()}
    return dataclasses.replace(state, tensors=copies)


def _nbytes(model: nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _refuse_large(nbytes: int, max_bytes: int) -> None:
    if nbytes > max_bytes:
        raise CheckpointError(
            f"fleet.state_dict: the values take {nbytes:,} bytes, more than max_bytes={max_bytes:,}"
            f"; give fleet.state_dict(model, max_bytes={nbytes}) if worker 0 has the memory, or "
            "write files by fleet.save_persistables(dirname), of which fleetlight export makes one"
        )


# -- into the job


def _load(context: Context, model: nn.Module, state: State) -> None:
    operation, is_first = "fleet.load_state_dict", context.group.index == 0
    loads: list[Callable[[], None]] = []
    extra = b""
    with context.at_rest(everything=True):
        context.group.assemble(operation)

        def fit() -> None:
            nonlocal extra
            loads.extend(_fitted(context, model, state))
            # one worker alone may be given what cannot travel
            extra = b"" if context.group.alone else extra_state.packed(model, state)

        def take() -> None:
            extra_state.put(model, extra)

        def load() -> None:
            for one in loads:
                one()

        context.group.together(fit if is_first else None, operation)
        context.group.together(load if is_first else None, operation)
        extra = context.group.broadcast_bytes(extra, operation)
        context.group.together(None if is_first else take, operation)
        context.group.broadcast(_held_here(context, model), operation)
        averaging.begin_anew(context, names_of(registered_model(context)))
    if context.session is not None and context.session.drawn.plan.mode != SYNC:
        # nobody pushes before all have taken the values: they would not be the same
        context.group.barrier(operation)


def _held_here(context: Context, model: nn.Module) -> list[Tensor]:
    """What workers keep themselves."""
    served: set[int] = set()
    if context.session is not None:
        drawn = context.session.drawn
        kept = drawn.dense if drawn.plan.serves_dense else []
        served = {id(tensor) for tensor in (*table_weights(drawn), *kept)}
    tensors = (*model.parameters(), *model.buffers())
    return [t.detach() for t in tensors if id(t) not in served and t.numel()]


def _fitted(context: Context, model: nn.Module, state: State) -> Iterator[Callable[[], None]]:
    """Compare everything; what then puts it in place."""
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            f"fleet.load_state_dict: worker 0 gave {_said(state)}, expected what fleet.state_dict "
            "gave it"
        )
    session, values = context.session, dict(state)
    tables: dict[int, tuple[Tensor, Tensor]] = {}
    if session is not None:
        scope = _Scope(context, model)
        weights = {id(weight) for weight in table_weights(session.drawn)}
        live = model.state_dict(keep_vars=True)
        tables = {number: _taken(scope, number, values) for number in scope.tables}
        values |= {name: weight for name, weight in live.items() if id(weight) in weights}
        # the servers' values may be newer than those here
        yield session.communicator.take_dense
    named = ModelState(values, dict.fromkeys(values, "parameter"))
    yield checkpoint.fitted_model_state(model, named)
    if session is not None:
        for number, (ids, rows) in tables.items():
            yield functools.partial(_refill, session.client, number, ids, rows)
        if session.drawn.plan.serves_dense:
            yield functools.partial(session.client.refill_dense, session.live)


def _taken(scope: _Scope, number: int, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids and rows of a table, taken out of a state."""
    assert scope.session is not None
    plan, name = scope.session.drawn.plan.tables[number], scope.table_name(number)
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


def _refill(client: Client, number: int, ids: Tensor, rows: Tensor) -> None:
    """Rows in pieces; with the first, all others go back to their first values."""
    size = max(1, _PIECE_BYTES // (8 + 4 * rows.shape[1]))
    for start in range(0, max(1, len(ids)), size):
        piece = slice(start, start + size)
        client.refill(number, ids[piece].numpy(), rows[piece].numpy(), reset=not start)


def _said(state: Any) -> str:
    return f"a {type(state).__name__}" if not isinstance(state, Mapping) else "an empty state"
