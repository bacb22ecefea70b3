# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint into parameter servers: from the workers, or when a server starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import Checkpoint, ModelState, OptimizerState, TableEntry
from fleetlight.checkpoint.formats.values import unpack
from fleetlight.errors import CheckpointError, ConfigError
from fleetlight.fleet.checkpoints.save_options import WORKER0
from fleetlight.fleet.job import Job
from fleetlight.fleet.plan.bound_plan import BoundPlan
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.server_checkpoint import elsewhere, table_weights
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.fleet.training.registering import names_of
from fleetlight.kernels import servers_of
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.dtypes import NAMES, flat_array
from fleetlight.ps.placement import Placement, buckets_of
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.server import Server
from fleetlight.ps.tables.dense_state import PieceState, WholeState, part

# not `from fleetlight import`, which imports the API and would be a circle

ServerRequest = tuple[m.Message, Sequence[NDArray[Any]]]


class RestorePlan:
    """A checkpoint, compared with the plan of the job that loads it."""

    def __init__(self, bound: BoundPlan, saved: Checkpoint, epoch: int) -> None:
        self._bound, self._plan, self._saved, self._epoch = bound, bound.plan, saved, epoch
        self._entries = {entry.name: entry for entry in saved.manifest.tables}
        self._tensors: dict[str, Any] = saved.model().state_dict()
        refuse = checkpoint.refuse_differences
        refuse("tables", list(self._table_differences()))
        refuse("model", list(self._dense_differences()))
        #: by number of the table: weights that the saved job had not moved onto tables
        self._dense_tables = {
            number: self._tensors[f"{table.name}.weight"]
            for number, table in enumerate(self._plan.tables)
            if table.name not in self._entries
        }

    @property
    def files(self) -> list[tuple[int, str]]:
        """The files of tables, each with the number of its table in the plan."""
        return [
            (number, file.name)
            for number, table in enumerate(self._plan.tables)
            if table.name in self._entries
            for file in self._entries[table.name].files
        ]

    @property
    def nbytes(self) -> int:
        """The size of all files of tables."""
        return sum(size for size, _ in self._checksums(self.files).values())

    def check_request(self, server: int, names: Sequence[str] | None = None) -> m.Load:
        """Let a server check its files: those in the folder, or those that it was sent."""
        return self._load(server, names, dry=True)

    def requests(self, server: int, names: Sequence[str] | None = None) -> Iterator[ServerRequest]:
        """The requests to a server, in order."""
        yield self._load(server, names, dry=False), ()
        placement = Placement(self._plan)
        dense = part(self._plan, placement, server, self._whole())
        yield m.RestoreDense(dense.state, dense.scalars), [*dense.values, *dense.arrays]
        for number, weight in self._dense_tables.items():
            ids = np.arange(len(weight), dtype=np.int64)
            mine = ids[servers_of(ids, self._plan.server_num) == server]
            rows = weight.float().numpy()[mine]
            yield m.Fill([number], False, loaded=True), [mine, rows]

    def warnings(self) -> Iterator[str]:
        """Differences from the saved job that do not prevent a load."""
        for table in self._plan.tables:
            entry = self._entries.get(table.name)
            rule = "no rule" if entry is None else entry.rule
            if not self._plan.exchanges_differences and table.rule.name not in (rule, "sgd"):
                yield (
                    f"table {table.name}: it was saved with {rule} and is now trained with "
                    f"{table.rule.name}; its weights are loaded, its optimizer state is reset"
                )
        seed = self._saved.manifest.seed
        if self._entries and seed != self._plan.seed:
            yield (
                f"the checkpoint was saved with seed {seed}, this job has {self._plan.seed}: ids "
                "that are not in it get other first values than in the saved job"
            )

    def _load(self, server: int, names: Sequence[str] | None, dry: bool) -> m.Load:
        here = self._files_for(server)
        files = [(n, name) for n, name in here if names is None or name in names]
        folder = "" if names is not None else self._saved.location
        load = m.Load(folder, files, self._epoch, self._checksums(files), dry)
        if names is not None or not self._saved.base_location:
            return load
        return msgspec.structs.replace(
            load, base=self._saved.base_location, base_files=self._saved.base_files
        )

    def _files_for(self, server: int) -> list[tuple[int, str]]:
        """The files that may have rows of a server."""
        mine = buckets_of(server, self._plan.server_num)
        spans = {f.name: f.buckets for e in self._entries.values() for f in e.files}
        return [
            (number, name)
            for number, name in self.files
            if not (span := spans[name]) or (span[0] < mine.stop and mine.start < span[1])
        ]

    def _checksums(self, files: Sequence[tuple[int, str]]) -> dict[str, tuple[int, str]]:
        return self._saved.checksums({name for _, name in files})

    def _whole(self) -> WholeState:
        found, states = WholeState({}, {}), self._saved.optimizers()
        for number, dense in enumerate(self._plan.dense):
            found.values[number] = flat_array(self._tensors[dense.name])
            if dense.optimizer < len(states) and not self._plan.workers_step_dense:
                state = _state_of(states[dense.optimizer], dense.name)
                found.state[number] = PieceState.of(state, dense.shape, dense.name)
        return found

    def _table_differences(self) -> Iterator[str]:
        for table in self._plan.tables:
            entry = self._entries.get(table.name)
            if entry is not None:
                yield from _difference(table, entry)
            elif not self._has_weight(table):
                known = ", ".join(map(repr, self._entries)) or "no tables"
                yield (
                    f"table {table.name!r} (dim {table.dim}) is not in the checkpoint, which has "
                    f"{known}"
                )
        mine = {table.name for table in self._plan.tables}
        for name, entry in self._entries.items():
            if name not in mine:
                yield f"table {name!r} (dim {entry.dim}) of the checkpoint does not exist here"

    def _has_weight(self, table: TablePlan) -> bool:
        """True if the saved job had not moved this layer of torch onto a table."""
        weight = self._tensors.get(f"{table.name}.weight")
        return (
            table.rows > 0
            and isinstance(weight, Tensor)
            and tuple(weight.shape) == (table.rows, table.dim)
        )

    def _dense_differences(self) -> Iterator[str]:
        for dense in self._plan.dense:
            saved = self._tensors.get(dense.name)
            if not isinstance(saved, Tensor):
                yield f"parameter {dense.name!r} is not in the checkpoint"
            elif (tuple(saved.shape), NAMES.get(saved.dtype)) != (dense.shape, dense.dtype):
                yield (
                    f"parameter {dense.name!r} is {dense.dtype}{list(dense.shape)} here, but "
                    f"{str(saved.dtype).removeprefix('torch.')}{list(saved.shape)} in the "
                    "checkpoint"
                )


def _difference(table: TablePlan, entry: TableEntry) -> Iterator[str]:
    if table.dim != entry.dim:
        yield (
            f"table {table.name!r} has rows of {table.dim} weights here, but of {entry.dim} in the "
            "checkpoint"
        )
    elif table.rows and table.rows != entry.ids:
        ids = f"the ids 0 to {entry.ids - 1}" if entry.ids else "ids of any size"
        yield (
            f"table {table.name!r} has the ids 0 to {table.rows - 1} here, but {ids} in the "
            "checkpoint"
        )


def _state_of(optimizer: OptimizerState, name: str) -> Mapping[str, Any]:
    packed = optimizer.entry.state.get(name, {})
    return {key: unpack(value, optimizer.tensors) for key, value in packed.items()}


def check_optimizers(bound: BoundPlan, saved: Checkpoint) -> None:
    """CheckpointError unless the optimizers of the script have the classes of the saved ones."""
    entries = saved.manifest.optimizers
    if len(entries) != len(bound.optimizers):
        raise CheckpointError(
            f"{saved.directory} holds {len(entries)} optimizers, but this job has "
            f"{len(bound.optimizers)}; register the same ones before loading"
        )
    differences = [
        f"it is {checkpoint.class_name(mine)} here, but {entry.class_name} in the checkpoint"
        for number, (mine, entry) in enumerate(zip(bound.optimizers, entries, strict=True))
        if checkpoint.class_name(mine) != entry.class_name and steps_dense(bound, number)
    ]
    checkpoint.refuse_differences("optimizer", differences)


def steps_dense(bound: BoundPlan, optimizer: int) -> bool:
    """False for an optimizer of tables only, which has no state of its own."""
    return any(dense.optimizer == optimizer for dense in bound.plan.dense)


# not `from fleetlight import`, which imports the API and would be a circle


class ServedLoading:
    """A worker's part in a load: each worker reads its own, and worker 0 asks the servers."""

    def __init__(self, job: Job, session: ServerSession, saved: Checkpoint, via: str) -> None:
        self._bound = session.bound
        self._client = session.client
        self._saved = saved
        self._via = via
        self._is_first = job.group.index == 0
        self._files = TableFiles(session.client, job.group.deadline_s)
        self._epoch = max(session.client.epoch, saved.manifest.epoch) + 1
        #: by server: the files that it was sent
        self._sent_files: dict[int, list[str]] = {}
        check_optimizers(self._bound, saved)
        self._restore = RestorePlan(self._bound, saved, self._epoch)

    def prepare(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        names = names_of(model)
        yield checkpoint.prepare_model_load(model, self._model(model, self._saved.model()))
        for number, state in enumerate(self._saved.optimizers()):
            yield self._optimizer(number, names, state)
        self._check()
        yield self._load

    def _model(self, live: nn.Module, state: ModelState) -> ModelState:
        """The part of a saved model for a worker, where tables have no elements."""
        tables = {id(weight) for weight in table_weights(self._bound)}
        empty = {
            # the live weight itself means: nothing to load
            name: parameter
            for name, parameter in live.named_parameters()
            if id(parameter) in tables and name in state.tensors
        }
        return dataclasses.replace(state, tensors={**state.tensors, **empty})

    def _optimizer(
        self, number: int, names: Mapping[nn.Parameter, str], state: OptimizerState
    ) -> Callable[[], None]:
        """The step that loads hyper-parameters, and the state that is not on servers."""
        mine = self._bound.optimizers[number]
        if checkpoint.class_name(mine) != state.entry.class_name:
            # it steps tables only; `warnings` reports the change of their rule
            return lambda: None
        return checkpoint.prepare_optimizer_load(mine, names, state, elsewhere(self._bound))

    def _check(self) -> None:
        """Let the servers check that they can load."""
        if not self._is_first:
            return
        nbytes = self._restore.nbytes
        for text in self._restore.warnings():
            logger.warning("%s", text)
        if self._via == WORKER0:
            self._sent_files = self._files.send(self._saved, self._restore.files)
        looks = {n: (self._restore.check_request(n, self._names(n)), ()) for n in self._servers}
        self._files.ask(looks, nbytes)

    def _load(self) -> None:
        """Let the servers load; they refuse earlier pushes from then on."""
        self._client.epoch = self._epoch
        if not self._is_first:
            return
        requests = [self._restore.requests(n, self._names(n)) for n in self._servers]
        for each in zip(*requests, strict=True):
            self._files.ask(dict(enumerate(each)), self._restore.nbytes)

    def end(self) -> None:
        """Let the servers free the files that they were sent."""
        if self._is_first and self._via == WORKER0:
            self._files.drop()

    @property
    def _servers(self) -> range:
        return range(self._client.server_num)

    def _names(self, server: int) -> list[str] | None:
        return self._sent_files[server] if self._via == WORKER0 else None


def open_loaded(
    server: Server,
    bound: BoundPlan,
    dirname: str,
    durable: Durable | None = None,
) -> None:
    """Open a server with its part of a checkpoint; first values of workers do not replace it.

    A server with durable state of an earlier incarnation does not read it: that state is newer.
    """
    if bound.dense and not bound.plan.serves_dense:
        raise ConfigError(
            f"fleet.init_server({dirname!r}): with dense='allreduce' the workers have the "
            "dense values, which a server cannot load for them; call fleet.init_server() here and "
            "fleet.load_persistables(dirname) in every worker, which loads the tables, too"
        )

    def requests() -> Iterator[ServerRequest]:
        saved = checkpoint.read(dirname)
        check_optimizers(bound, saved)
        restore = RestorePlan(bound, saved, saved.manifest.epoch + 1)
        for text in restore.warnings():
            logger.warning("%s", text)
        yield restore.check_request(server.index), ()
        yield from restore.requests(server.index)
        logger.info("loaded %s, saved at step %d", dirname, saved.manifest.step)

    server.open(bound.plan, bound.optimizers, bound.dense, requests, durable)
