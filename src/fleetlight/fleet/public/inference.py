# SPDX-License-Identifier: Apache-2.0
"""Models for inference: what is exported runs alone, its tables' rows included."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight import checkpoint
from fleetlight.checkpoint import InferenceModel
from fleetlight.errors import ConfigError, PlanError, did_you_mean, names_arguments
from fleetlight.fleet.context import Context, current, current_or_none
from fleetlight.fleet.plan.remote_embedding import MovedForward
from fleetlight.fleet.served.session import Session
from fleetlight.fleet.served.tables.table_files import WORKER0, TableFiles
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.model import as_plain_module
from fleetlight.fleet.training.registered import refuse_in_server, registered_model
from fleetlight.kernels import BUCKETS, Initializer, table_seed
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.frozen import FrozenRows, frozen
from fleetlight.ps.plan import ASYNC, TablePlan
from fleetlight.ps.tables.table_file import WEIGHTS, Column, TableReader
from fleetlight.torch_compat.modules import children

if TYPE_CHECKING:
    from fleetlight.static.inference import Feeds, StandIn
    from fleetlight.static.program import Program

Directory = str | os.PathLike[str]
Examples = tuple[Tensor, ...] | Mapping[str, Tensor] | Tensor
#: ids to keep of each table by its name, or "all"
Rows = str | Mapping[str, Tensor]
#: ids, ascending, and their rows
_Table = tuple[NDArray[np.int64], NDArray[np.float32]]


@overload
def save_inference_model(
    dirname: Directory,
    example_inputs: Examples,
    model: nn.Module | None = None,
    *,
    dynamic_batch: bool | list[str] = True,
    rows: Rows = "all",
) -> None:
    """Of a model, with the rows of its tables."""


@overload
def save_inference_model(
    dirname: Directory,
    feeds: Feeds,
    fetches: Sequence[Any],
    /,
    *,
    dynamic_batch: bool | list[str] = True,
    rows: Rows = "all",
    program: Program,
) -> None:
    """Of a static program: feeds and fetches are variables or their names."""


@overload
def save_inference_model(
    dirname: Directory,
    *,
    feeds: Feeds,
    fetches: Sequence[Any],
    dynamic_batch: bool | list[str] = True,
    rows: Rows = "all",
    program: Program,
) -> None:
    """The same, by keywords."""


@names_arguments
def save_inference_model(
    dirname: Directory,
    example_inputs: Any = None,
    model: Any = None,
    *others: Any,
    dynamic_batch: bool | list[str] = True,
    rows: Rows = "all",
    feeds: Any = None,
    fetches: Any = None,
    program: Program | None = None,
) -> None:
    """Export the model for inference; worker 0 writes, on the others it does nothing.

    What is written runs with `load_inference_model` alone: no job, no servers, no class of the
    model. The rows of tables are part of it: all, or those of some ids, `rows={"emb": ids}`. Other
    ids read their first values. Workers that train alone (LocalSGD, DiLoCo) differ: let all call
    `fleet.barrier_worker()` before.

    Of a static program, feeds and fetches follow in place of example inputs and model:
    `save_inference_model(dirname, ["x"], ["output"], program=program)`. It answers one fetch as it
    is, several as a tuple.
    """
    _refuse_old_form(dirname, example_inputs, model, *others)
    if program is not None:
        given = example_inputs if feeds is None else feeds
        wanted = model if fetches is None else fetches
        _save_program(dirname, program, given, wanted, dynamic_batch, rows)
        return
    if feeds is not None or fetches is not None:
        raise ConfigError(
            "save_inference_model: feeds and fetches are those of a static program; give it, too: "
            "program=fleet.main_program"
        )
    context = current()
    refuse_in_server(context, "save_inference_model")
    if context.group.index != 0:
        return
    local_training.warn_if_apart(context, "save_inference_model")
    examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    with contextlib.ExitStack() as stack:
        module = model or registered_model(context)
        if context.session is not None:
            module = stack.enter_context(with_frozen_tables(context, module, rows))
        stack.enter_context(as_plain_module(module))
        checkpoint.save_inference(dirname, module, examples, dynamic_batch=dynamic_batch)


def _refuse_old_form(dirname: Any, *others: Any) -> None:
    """Fleet took an executor, the folder, the feeds and the fetches."""
    if isinstance(dirname, (str, os.PathLike)) and len(others) == 2:
        return
    got = ", ".join(type(value).__name__ for value in (dirname, *others) if value is not None)
    raise ConfigError(
        f"fleet.save_inference_model: got ({got}), expected a folder, feeds and fetches; there is "
        "no executor to pass here: write fleet.save_inference_model(dirname, feeds, fetches, "
        "program=program)"
    )


def _save_program(
    dirname: Directory,
    program: Program,
    feeds: Any,
    fetches: Any,
    dynamic: bool | list[str],
    rows: Rows,
) -> None:
    """Export what a program computes of its feeds. Without tables it needs no `fleet.init`."""
    from fleetlight.static.inference import examples_of, has_tables, inference_module

    if feeds is None or fetches is None:
        raise ConfigError(
            "save_inference_model: expected the feeds and the fetches of the program, as variables "
            'or names: save_inference_model(dirname, ["x"], ["output"], program=program)'
        )
    context = current_or_none()
    if context is not None:
        refuse_in_server(context, "save_inference_model")
        if context.group.index != 0:
            return
        local_training.warn_if_apart(context, "save_inference_model")
    examples, batched = examples_of(program, feeds)
    inputs = tuple(examples.values())
    if dynamic is True:
        dynamic = batched or False
    with contextlib.ExitStack() as stack:
        stand_in: StandIn | None = None
        if has_tables(program):
            is_served = context is not None and context.session is not None
            tables = _open_tables(current(), rows) if is_served else None
            stand_in = _unserved if tables is None else stack.enter_context(tables)
        module = inference_module(program, feeds, fetches, stand_in)
        checkpoint.save_inference(dirname, module, inputs, dynamic_batch=dynamic)


def _unserved(layer: nn.Module) -> nn.Module:
    """What stands in for a layer that has its rows itself."""
    if isinstance(layer, TableLayer):
        raise PlanError(
            f"save_inference_model: the rows of a {type(layer).__name__} are in a table of a job "
            "with parameter servers (or of fleet.init() in one process), and there is none here; "
            "call it in the worker that trains"
        )
    assert isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    return _unmoved(layer, layer.weight.detach())


def load_inference_model(dirname: Directory, device: str | torch.device = "cpu") -> InferenceModel:
    """A callable that computes what the exported model computes. Needs no `fleet.init`."""
    return checkpoint.load_inference(dirname, device)


@contextlib.contextmanager
def with_frozen_tables(context: Context, module: nn.Module, rows: Rows) -> Iterator[nn.Module]:
    """The module, with layers of torch alone in place of those whose rows are on the servers."""
    with _open_tables(context, rows) as stand_in:
        stands_in = {layer: stand_in(layer) for layer in module.modules() if _has_rows(layer)}
    with _replaced(module, stands_in):
        yield stands_in.get(module, module)


def _has_rows(layer: nn.Module) -> bool:
    """Whether its rows are on the servers."""
    moved = isinstance(layer.__dict__.get("forward"), MovedForward)
    return isinstance(layer, TableLayer) or moved


@contextlib.contextmanager
def _open_tables(context: Context, rows: Rows) -> Iterator[StandIn]:
    """Inside the block, a function that gives layers of torch alone for layers with tables."""
    session = context.session
    assert session is not None
    if session.is_open or context.group.alone:
        session.open(context)
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
    with _Tables(context, session, rows) as tables:
        yield tables.stand_in


class _Tables(contextlib.AbstractContextManager["_Tables"]):
    """The rows of all tables, in files of this process while the model is exported."""

    def __init__(self, context: Context, session: Session, rows: Rows) -> None:
        self._drawn = session.drawn
        self._rows = rows
        self._files = TableFiles(session.client, context.group.deadline_s)
        self._context = context
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-export-")
        self._frozen: dict[int, FrozenRows] = {}
        self._by_table: dict[int, list[Path]] = {}

    def __enter__(self) -> _Tables:
        # the servers write one thing at a time
        self._context.saving.finish()
        try:
            folder = Path(self._folder.name)
            saved, _ = self._files.save(folder, WORKER0, self._context.step)
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
        return _unmoved(layer, self.dense(layer))

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


def _unmoved(layer: nn.Embedding | nn.EmbeddingBag, weight: Tensor) -> nn.Module:
    """A layer of torch with its own forward and all of its rows."""
    weight = weight.to(layer.weight.device, layer.weight.dtype)
    kind: Any = nn.Embedding
    settings: dict[str, Any] = {"padding_idx": layer.padding_idx}
    if isinstance(layer, nn.EmbeddingBag):
        settings |= {"mode": layer.mode, "include_last_offset": layer.include_last_offset}
        kind = nn.EmbeddingBag
    plain: nn.Module = kind.from_pretrained(weight, **settings)
    return plain


@contextlib.contextmanager
def _replaced(module: nn.Module, stands_in: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Other modules in the places of some."""
    places = [
        (parent, name, child)
        for parent in list(module.modules())
        for name, child in children(parent).items()
        if child in stands_in
    ]
    for parent, name, child in places:
        assert child is not None
        children(parent)[name] = stands_in[child]
    try:
        yield
    finally:
        for parent, name, child in places:
            children(parent)[name] = child


def _check_rows(session: Session, rows: Rows) -> None:
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
