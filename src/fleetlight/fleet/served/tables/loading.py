# SPDX-License-Identifier: Apache-2.0
"""Brings a checkpoint to parameter servers: from the workers, or as a server begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import nn

# not `from fleetlight import`, which asks for the API, and that is being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import Checkpoint, ModelState, OptimizerState
from fleetlight.errors import ConfigError
from fleetlight.fleet.checkpoints.checkpoint_copy import WORKER0
from fleetlight.fleet.job import Job
from fleetlight.fleet.plan.bound_plan import BoundPlan
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.server_checkpoint import elsewhere, table_weights
from fleetlight.fleet.served.tables.server_restore import Restoration, Words, check_optimizers
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.fleet.training.registering import names_of
from fleetlight.observe.log import logger
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.server import Server


class ServedLoading:
    """A worker's part in a load: everybody takes its own, worker 0 tells the servers."""

    def __init__(self, job: Job, session: ServerSession, saved: Checkpoint, via: str) -> None:
        self._drawn = session.drawn
        self._client = session.client
        self._saved = saved
        self._via = via
        self._is_first = job.group.index == 0
        self._files = TableFiles(session.client, job.group.deadline_s)
        self._epoch = max(session.client.epoch, saved.manifest.epoch) + 1
        #: the files that each server got
        self._brought: dict[int, list[str]] = {}
        check_optimizers(self._drawn, saved)
        self._restoration = Restoration(self._drawn, saved, self._epoch)

    def fitted(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """As in `Loading`."""
        names = names_of(model)
        yield checkpoint.prepare_model_load(model, self._model(model, self._saved.model()))
        for number, state in enumerate(self._saved.optimizers()):
            yield self._optimizer(number, names, state)
        self._look()
        yield self._load

    def _model(self, live: nn.Module, state: ModelState) -> ModelState:
        """What goes into a worker's model, where tables have no elements."""
        tables = {id(weight) for weight in table_weights(self._drawn)}
        empty = {
            # the live weight itself stands for no values
            name: parameter
            for name, parameter in live.named_parameters()
            if id(parameter) in tables and name in state.tensors
        }
        return dataclasses.replace(state, tensors={**state.tensors, **empty})

    def _optimizer(
        self, number: int, names: Mapping[nn.Parameter, str], state: OptimizerState
    ) -> Callable[[], None]:
        """What puts hyper-parameters into place, and the state that is not the servers'."""
        mine = self._drawn.optimizers[number]
        if checkpoint.class_name(mine) != state.entry.class_name:
            # it steps tables only; the change of their rule is told below
            return lambda: None
        return checkpoint.prepare_optimizer_load(mine, names, state, elsewhere(self._drawn))

    def _look(self) -> None:
        """Let the servers see whether they could load."""
        if not self._is_first:
            return
        nbytes = self._restoration.nbytes
        for text in self._restoration.warnings():
            logger.warning("%s", text)
        if self._via == WORKER0:
            self._brought = self._files.put(self._saved, self._restoration.files)
        looks = {n: (self._restoration.look(self._names(n)), ()) for n in self._servers}
        self._files.ask(looks, nbytes)

    def _load(self) -> None:
        """Let them load; what was pushed before is refused from then on."""
        self._client.epoch = self._epoch
        if not self._is_first:
            return
        words = [self._restoration.words(n, self._names(n)) for n in self._servers]
        for each in zip(*words, strict=True):
            self._files.ask(dict(enumerate(each)), self._restoration.nbytes)

    def end(self) -> None:
        """Let go of what was brought to the servers."""
        if self._is_first and self._via == WORKER0:
            self._files.drop()

    @property
    def _servers(self) -> range:
        return range(self._client.server_num)

    def _names(self, server: int) -> list[str] | None:
        return self._brought[server] if self._via == WORKER0 else None


def open_loaded(
    server: Server,
    drawn: BoundPlan,
    dirname: Path,
    durable: Durable | None = None,
    read: Callable[[Path], Checkpoint] = checkpoint.read,
) -> None:
    """Open a server with its part of a checkpoint, which workers' first values do not replace.

    It is not read where an earlier life of the server has left values: those are later ones.
    """
    if drawn.dense and not drawn.plan.serves_dense:
        raise ConfigError(
            f"fleet.init_server({str(dirname)!r}): with dense='allreduce' the workers keep the "
            "dense values, and a server cannot load those for them; call fleet.init_server() here "
            "and fleet.load_persistables(dirname) in every worker, which loads the tables as well"
        )

    def words() -> Iterator[Words]:
        saved = read(dirname)
        check_optimizers(drawn, saved)
        restoration = Restoration(drawn, saved, saved.manifest.epoch + 1)
        for text in restoration.warnings():
            logger.warning("%s", text)
        yield restoration.look(), ()
        yield from restoration.words(server.index)
        logger.info("loaded %s, saved at step %d", dirname, saved.manifest.step)

    server.open(drawn.plan, drawn.optimizers, drawn.dense, words, durable)
