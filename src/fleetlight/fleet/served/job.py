# SPDX-License-Identifier: Apache-2.0
"""`ServedJob`: a worker of a job with parameter servers, or one process with a server inside."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fleetlight.collective.group import Group
from fleetlight.errors import PeerError, PlanError
from fleetlight.fleet.checkpoints import stopping
from fleetlight.fleet.checkpoints.model_values import ServedValues
from fleetlight.fleet.checkpoints.stop_calls import ServedCalls
from fleetlight.fleet.checkpoints.worker_state import served
from fleetlight.fleet.context import Context
from fleetlight.fleet.exit.exit_status import tell_left, tell_parting
from fleetlight.fleet.served.replay import Recovery
from fleetlight.fleet.served.session import Session
from fleetlight.fleet.served.steps import ServedPolicy, ServedSteps
from fleetlight.fleet.served.tables.server_checkpoint import ServedCut
from fleetlight.fleet.training.model import ModelPlan
from fleetlight.fleet.training.optimizer import OptimizerPlan
from fleetlight.ps.plan import GEO
from fleetlight.ps.worker.communicator.base import norm_of
from fleetlight.ps.worker.crew import Crew

if TYPE_CHECKING:
    from fleetlight.fleet.server.job import Service


@dataclasses.dataclass
class ServedJob(Context):
    """Gradients go to the servers, and values come back."""

    is_served: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.closers.callback(self._drop_what_was_kept)
        self.closers.callback(self._say_goodbye)
        self.closers.callback(lambda: self.own_session.leave())

    @property
    def own_session(self) -> Session:
        """This worker's part in the job."""
        assert self.session is not None
        return self.session

    @property
    def _crew(self) -> Crew:
        assert isinstance(self.group, Crew)
        return self.group

    def plan_model(self, module: nn.Module) -> ModelPlan:
        """As in `Context`."""
        return ModelPlan(module, self, ServedPolicy())

    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerPlan:
        """As in `Context`."""
        return OptimizerPlan(optimizer, self, lambda plan: ServedSteps(plan, self.own_session))

    def refuse_late(self, call: str) -> None:
        """The plan is drawn once."""
        if not self.own_session.is_open:
            return
        anew = (
            ", or, to train another model from here on, call fleet.reset() and then fleet.init()"
            if self.group.alone
            else ""
        )
        raise PlanError(
            f"{call} came after fleet.init_worker() or the first forward, when the servers had "
            f"made their tables; call it before{anew}"
        )

    @property
    def recovery(self) -> Recovery | None:
        """As in `Context`."""
        return self.own_session.recovery

    @property
    def dense_group(self) -> Group | None:
        """As in `Context`; with `dense="allreduce"`, once the job is open."""
        return self.own_session.dense_group

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """In sync mode only the servers know the gradients of all workers together."""
        for model in self.models:
            model.freeze()
        owners = self._owners({id(parameter) for parameter in parameters})
        updates = [steps.update() for steps in owners]
        merges = [steps.plan.merge for steps in owners]
        if any(merge is not None and merge.is_between() for merge in merges):
            return torch.tensor(norm_of(updates, norm_type))
        norm = self.own_session.clip(updates, max_norm, norm_type)
        for steps in owners:
            steps.norm = norm
        return torch.tensor(norm)

    def _owners(self, wanted: set[int]) -> list[ServedSteps]:
        """The optimizers that step those parameters; each is clipped as a whole."""
        owners = []
        for steps in served(self):
            mine = {id(p) for group in steps.optimizer.param_groups for p in group["params"]}
            if mine & wanted:
                owners.append(steps)
            if mine & wanted and mine - wanted:
                raise PlanError(
                    "clip_grad_norm_: got some of the parameters of an optimizer; with parameter "
                    "servers the gradients of an optimizer are clipped together, give all of them"
                )
        return owners

    def open(self) -> None:
        """As in `Context`."""
        self.own_session.open(self)

    def once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """As in `Context`."""
        return self.own_session.client.answers.once(call, action)

    def cut(self, model: nn.Module, via: str) -> ServedCut:
        """As in `Context`; the servers write one thing at a time."""
        self.saving.finish()
        return ServedCut(self, self.own_session, model, via)

    def values_of(self, model: nn.Module) -> ServedValues:
        """As in `Context`."""
        return ServedValues(self, self.own_session, model)

    def prepare(self) -> None:
        """As in `Context`."""
        self.open()
        self.agree_on_models()

    def server(self, call: str) -> Service:
        """As in `Context`."""
        raise self.no_server(call)

    def barrier(self) -> None:
        """As in `Context`."""
        self.own_session.barrier(self)

    @contextlib.contextmanager
    def at_rest(self, *, everything: bool = False) -> Iterator[None]:
        """Inside the block nothing of this worker is on its way to the servers.

        Under GeoSGD, or if `everything` is to be, workers and servers are equal after it.
        """
        self.open()
        for model in self.models:
            model.freeze()
        communicator = self.own_session.communicator
        if self.is_catching_up:
            # an earlier life of this worker has done what follows
            yield
            return
        forced = everything or self.own_session.drawn.plan.mode == GEO
        communicator.settle() if forced else communicator.flush()
        try:
            yield
        except PeerError:
            raise
        except Exception:
            if forced:
                communicator.resume()
            raise
        if forced:
            communicator.resume()

    def watch_terminations(self) -> None:
        """As in `Context`."""
        crew = self._crew
        stopping.watch_in_worker(self, ServedCalls(self, self.own_session, crew))
        if self.stopping is not None:
            crew.when_left_alone = self.stopping.left_alone

    def finish(self) -> None:
        """The last pushes; when they fail, the others are told, and no goodbye follows."""
        try:
            for loader in self.loaders:
                loader.give_back()
            self.own_session.stop()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.group.fail(text)
            self.own_session.fail(text)
            raise

    def fail(self, error: str, *, consequence: bool) -> None:
        """As in `Context`."""
        self.own_session.fail(error)
        self.group.fail(error, consequence=consequence)

    def forget(self) -> None:
        """As in `Context`."""
        self.own_session.let_go()

    def _say_goodbye(self) -> None:
        tell_parting(self.role)
        self.group.leave()
        tell_left(self.role)

    def _drop_what_was_kept(self) -> None:
        """After the goodbye nobody asks for it any more, unless the job resumes.

        A worker that has left says so in its folder; one that stops is resumed from a checkpoint.
        """
        if self.own_session.embedded is not None:
            self.own_session.embedded.close()
        if self.own_session.client.redo is not None:
            self.own_session.client.redo.close(is_needed=False, ended=not self._crew.stopped)
