# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint into parameter servers: from the workers, or when a server starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from torch import nn

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import Checkpoint, ModelState, OptimizerState
from fleetlight.errors import ConfigError
from fleetlight.fleet.checkpoints.save_options import WORKER0
from fleetlight.fleet.job import Job
from fleetlight.fleet.plan.bound_plan import BoundPlan
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.server_checkpoint import elsewhere, table_weights
from fleetlight.fleet.served.tables.server_restore import (
    RestorePlan,
    ServerRequest,
    check_optimizers,
)
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.fleet.training.registering import names_of
from fleetlight.observe.log import logger
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.server import Server


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
