# SPDX-License-Identifier: Apache-2.0
"""`ServerSession`: a worker's part in a job with servers, from the first forward to the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.collective.forming import form
from fleetlight.collective.group import Group
from fleetlight.collective.membership.liveness import Liveness
from fleetlight.errors import PlanError, counted
from fleetlight.fleet.exit.exit_status import report_dispensable
from fleetlight.fleet.job import Job
from fleetlight.fleet.plan.bound_plan import BoundPlan, build_plan
from fleetlight.fleet.plan.remote_embedding import RemoteEmbedding, is_movable, rows_of
from fleetlight.fleet.plan.table_names import refuse_taken
from fleetlight.fleet.served import figures
from fleetlight.fleet.served.durable.durability_dir import durable_of
from fleetlight.fleet.served.durable.replay import NoStepReplay, StepReplay
from fleetlight.fleet.served.tables.partial_state import answer_without_tables, warn_of_pickle
from fleetlight.kernels import all_finite
from fleetlight.observe.log import logger
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.handle import TableHandle
from fleetlight.ps.layers.table_gradient import TableGradient, as_one
from fleetlight.ps.layers.table_weight import stand_for
from fleetlight.ps.plan import ASYNC, SYNC
from fleetlight.ps.server.server import Server
from fleetlight.ps.tables.optimizers import PushOptions
from fleetlight.ps.update import Floats, Ids, TableGradients, Update
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator import Communicator, open_communicator
from fleetlight.ps.worker.communicator.base import norm_of
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.strategy import ASyncConfigs
from fleetlight.version import VERSION

#: how many parameters a warning names
_NAMED = 3


class ServerSession:
    """Knows the plan and moves values between the user's objects and the communicator."""

    def __init__(
        self, client: Client, embedded: Server | None, replay: StepReplay | None = None
    ) -> None:
        self.client = client
        #: how another life of this worker resumes where this one stops
        self.replay: StepReplay = replay or NoStepReplay()
        #: asked at every step
        self.one_trainer = OneTrainer()
        #: the server of a job of one process
        self.embedded = embedded
        #: the workers that average dense gradients among themselves, when the servers do not
        self.dense_group: Group | None = None
        #: what a scheduler sees of this worker
        self.signs: Liveness | None = None
        #: True once this worker makes no more step
        self.is_over = False
        #: True once the others have been told how this worker ended
        self._has_left = False
        self._drawn: BoundPlan | None = None
        self._communicator: Communicator | None = None
        self._live: LocalParameters | None = None
        #: how it was asked to exchange when it opened
        self._configs = ASyncConfigs()
        #: what each optimizer's gradients were clipped as, until its step
        self._clipped: dict[int, Update] = {}
        #: by optimizer: what its param groups say
        self._options: dict[int, list[PushOptions]] = {}
        #: what layers have been given
        self._handles: list[TableHandle] = []
        #: the dense parameters of which it was said that what is written there is lost
        self._warned: set[int] = set()
        self._has_warned_of_clip = False

    @property
    def is_open(self) -> bool:
        """True once the plan is agreed on and the first values are in place."""
        return self._communicator is not None

    @property
    def drawn(self) -> BoundPlan:
        """The plan and its objects."""
        assert self._drawn is not None, "the session is not open"
        return self._drawn

    @property
    def communicator(self) -> Communicator:
        """What pulls and pushes."""
        assert self._communicator is not None, "the session is not open"
        return self._communicator

    @property
    def live(self) -> LocalParameters:
        """The dense parameters in training."""
        assert self._live is not None, "the session is not open"
        return self._live

    def open(self, job: Job) -> None:
        """Agree on the plan with the servers and bring the first values into place; once."""
        if self.is_open:
            return
        self._drawn = drawn = bound_plan_of(job)
        if self.embedded is not None:
            durable = durable_of(job)
            self.embedded.open(drawn.plan, drawn.optimizers, drawn.dense, durable=durable)
        self.client.join(drawn.plan)
        if self.client.redo is not None:
            self.client.redo.begin()
        if drawn.plan.durability != "none":
            durability = job.strategy.durability_configs
            self.client.wait_for_comebacks(durability.away_within(job.group.deadline_s))
        self._live = LocalParameters(drawn.dense)
        if job.group.index == 0:
            self.client.answers.once("first values", lambda: self._fill(drawn))
        if not drawn.plan.serves_dense and job.role.worker_num > 1:
            limit_s = job.group.deadline_s
            self.dense_group = form(
                job.role,
                VERSION,
                limit_s,
                self.signs,
                job.tls,
            )[1]
            if self.dense_group.liveness is self.signs:
                # told by whoever averages from now on
                self.signs = None
        job.group.broadcast(_others(job, drawn), "first values of the model")
        job.group.barrier("init_worker")
        self._configs = configs = job.strategy.a_sync_configs
        self._communicator = open_communicator(
            self.client,
            self._live,
            queue_size=configs.send_queue_size if configs.has_queue else None,
            max_merge=configs.max_merge,
            cache_rows=configs.cache_rows,
        )
        self._hand_out()
        layers = [layer for some in drawn.layers for layer in some]
        answer_without_tables([plan.module for plan in job.models], layers)
        self.replay.has_applied = self._communicator.go_on()
        self._communicator.start()
        if drawn.plan.lost_worker == "go_on" and job.group.index:
            report_dispensable(job.role)
        self.replay.begin()
        logger.info("%s", _told(drawn))

    def _fill(self, drawn: BoundPlan) -> Sequence[bytes]:
        self.client.fill(_first_rows(drawn), self.live)
        return ()

    def _hand_out(self) -> None:
        """Give each layer the way to its table."""
        for number, layers in enumerate(self.drawn.layers):
            table = self.drawn.plan.tables[number]
            handle = TableHandle(number, table, self.communicator, warn_of_pickle)
            self._handles.append(handle)
            for layer in layers:
                if isinstance(layer, TableLayer):
                    layer.handle = handle
                    # it may be a plain Parameter, put there by load_state_dict(assign=True)
                    stand_for(layer.weight, handle.plan.name)
                elif is_movable(layer):
                    RemoteEmbedding(layer, handle)  # type: ignore[arg-type]
        # the servers keep what the rules remember of rows
        for optimizer in self.drawn.optimizers:
            for weight in (w for n in range(len(self.drawn.layers)) for w in self.drawn.weights(n)):
                optimizer.state.pop(weight, None)

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Which of the registered optimizers it is."""
        return _number(self.drawn.optimizers, optimizer)

    def collect(self, optimizer: torch.optim.Optimizer, step: int) -> Update:
        """What a step of this optimizer brings: gradients as they stand, and its settings."""
        drawn = self.drawn
        number = self.number_of(optimizer)
        return Update(
            optimizer=number,
            step=step,
            options=self._options_of(number, optimizer),
            tables=self._table_gradients(number),
            dense={
                index: _flat_gradient(parameter)
                for index, parameter in enumerate(drawn.dense)
                if drawn.plan.serves_dense and drawn.plan.dense[index].optimizer == number
            },
        )

    def _options_of(self, number: int, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        known = self._options.setdefault(number, [])
        while len(known) < len(optimizer.param_groups):
            known.append(PushOptions())
        return [
            options.of(group) for options, group in zip(known, optimizer.param_groups, strict=False)
        ]

    def _table_gradients(self, optimizer: int) -> dict[int, TableGradients]:
        plan, found = self.drawn.plan, {}
        for number, table in enumerate(plan.tables):
            if table.optimizer != optimizer:
                continue
            weights = self.drawn.weights(number)
            grads = [w.grad for w in weights if isinstance(w.grad, TableGradient)]
            self._warn_of_local_clip(table.name, grads)
            parts = [part for gradient in grads for part in gradient.parts]
            merged = as_one(parts, plan.server_num)
            if merged is not None:
                found[number] = merged
        return found

    def _warn_of_local_clip(self, table: str, gradients: list[TableGradient]) -> None:
        """Once, in sync mode: the step is to be that of one process on all batches together."""
        plan = self.drawn.plan
        if self._has_warned_of_clip or plan.mode != SYNC or plan.worker_num == 1:
            return
        if any(gradient.is_clipped for gradient in gradients):
            self._has_warned_of_clip = True
            logger.warning(
                "the gradient of table %s was clipped before the step by the norm of this worker's "
                "batch, as torch.nn.utils.clip_grad_norm_ does, so the result differs from one "
                "process: in sync mode call fleet.clip_grad_norm_(model, max_norm), which clips by "
                "the norm over the batches of all workers",
                table,
            )

    def skips(self, update: Update) -> bool:
        """Whether nobody makes this step, since the gradients are not finite; perhaps an error."""
        plan = self.drawn.plan
        if plan.mode != ASYNC or plan.on_nonfinite == "apply" or update.skip:
            return False
        arrays = [array for array in update.dense.values() if array is not None]
        arrays += [part.gradients for part in update.tables.values()]
        if all(array.dtype != np.uint16 and all_finite(array) for array in arrays):
            return False
        # with the words for what is wrong
        return self.client.parcel(update, self.live).skip

    def step(self, update: Update, moment: ResumePoint | None = None) -> bool:
        """Send an update; False when somebody's infinity made it a skip for all."""
        self._warn_of_lost_values()
        clipped = self._clipped.pop(update.optimizer, None)
        if clipped is not None:
            # gradients that were cleared since are not to be applied, but others wait for the step
            clipped.skip = update.skip or update.is_empty
            update = clipped
        return self.communicator.step(update, moment)

    def _warn_of_lost_values(self) -> None:
        """Of values that the script has written into parameters which the servers keep; once."""
        plan = self.drawn.plan
        if plan.workers_step_dense or not plan.serves_dense:
            return
        lost = [n for n in self.live.written() if n not in self._warned]
        if lost:
            self._warned.update(lost)
            names = ", ".join(plan.dense[n].name for n in lost[:_NAMED])
            names += f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
            logger.warning(
                "%s: written to since the last step, but the servers keep the values of dense "
                "parameters, and theirs replace what was written; call load_state_dict before "
                "fleet.init_worker(), or load values by fleet.load_state_dict or "
                "fleet.load_persistables (where the old values were put back, all is well)",
                names,
            )

    def barrier(self, job: Job) -> None:
        """Leave all workers equal."""
        # in a worker that was started again this barrier is long past
        is_past = self.replay.is_catching_up
        if self.is_open and not is_past:
            self._warn_of_lost_values()
            self.communicator.settle()
        job.group.barrier("barrier_worker")
        if self.is_open:
            if not is_past:
                self.communicator.resume()
            if self.drawn.plan.mode != SYNC:
                # nobody goes on before all have taken the values: they would not be the same
                job.group.barrier("barrier_worker")

    def stop(self) -> None:
        """Let everything this worker has brought be applied, and say what was done."""
        self.is_over = True
        if self.is_open:
            self.communicator.stop()
            logger.info("%s", figures.of_worker(self.communicator.figures()))
            if self.client.worker == 0:
                counted = self.client.figures()
                logger.info("%s", figures.of_servers(counted))
                late = figures.too_late(counted, self.drawn.plan, self._configs)
                if late:
                    logger.warning("%s", late)

    def leave(self) -> None:
        """Part from the scheduler, and the workers that averaged with this one."""
        if not self._take_leave():
            return
        if self.signs is not None:
            self.signs.depart(None)
            self.signs.release_store()
        if self.dense_group is not None:
            self.dense_group.leave()

    def let_go(self) -> None:
        """Leave layers no way to tables that are gone."""
        for handle in self._handles:
            handle.close()
        self._handles.clear()

    def fail(self, error: str) -> None:
        """The same after an error, which they are told; what they hear first is what counts."""
        if not self._take_leave():
            return
        if self.signs is not None:
            self.signs.depart(error)
            self.signs.release_store()
        if self.dense_group is not None:
            self.dense_group.fail(error)

    @property
    def has_left(self) -> bool:
        """True once this worker has no part in the job any more."""
        return self._has_left

    def _take_leave(self) -> bool:
        """True the first time."""
        before, self._has_left = self._has_left, True
        return not before

    def clip(self, updates: list[Update], max_norm: float, norm_type: float) -> float:
        """The norm of all gradients; the coming steps apply them scaled to `max_norm`."""
        if self.replay.is_passing:
            # of a step that the servers have
            return norm_of(updates, norm_type)
        if not self.drawn.plan.serves_dense:
            raise PlanError(
                "clip_grad_norm_: with dense='allreduce' dense gradients are not where those of "
                "tables are; clip the dense ones with torch.nn.utils.clip_grad_norm_"
            )
        total = self.communicator.clip(updates, max_norm, norm_type)
        self._clipped.update({update.optimizer: update for update in updates})
        if self.drawn.plan.workers_step_dense:
            self._give_back(updates)
        return total

    def _give_back(self, updates: list[Update]) -> None:
        """Torch's own step, if the worker makes it, must see what was scaled: perhaps copies."""
        for update in updates:
            for number, values in update.dense.items():
                gradient = self.drawn.dense[number].grad
                if values is not None and gradient is not None and not gradient.is_sparse:
                    gradient.copy_(as_tensor(values, gradient.dtype).view(gradient.shape))


class OneTrainer:
    """Knows which thread is inside a step of this worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A step begins; PlanError while one of another thread goes on."""
        me = threading.current_thread()
        with self._lock:
            other = self._thread
            # a thread may have died amid its step
            if other is not None and other is not me and other.is_alive():
                raise PlanError(
                    f"optimizer.step was called by thread {me.name} while thread {other.name} was "
                    "inside optimizer.step, expected one step of a worker at a time: two threads "
                    "that train mix their gradients; train in one thread (others may call the "
                    "model under torch.no_grad()), hold a lock of your own from forward to step, "
                    "or start more workers (fleetrun --worker_num)"
                )
            self._thread = me

    def end(self) -> None:
        """The step is over."""
        self._thread = None


def bound_plan_of(job: Job) -> BoundPlan:
    """The plan of what the script has registered in this process."""
    if not job.models:
        raise PlanError(
            "training with parameter servers needs to know the model; add "
            "model = fleet.distributed_model(model) before fleet.init_worker() and "
            "fleet.init_server()"
        )
    modules = [plan.module for plan in job.models]
    drawn = build_plan(
        modules[0] if len(modules) == 1 else nn.ModuleList(modules),
        [plan.optimizer for plan in job.optimizers],
        job.strategy,
        worker_num=job.role.worker_num,
        server_num=max(1, job.role.server_num),
    )
    for number, module in enumerate(modules if len(modules) > 1 else ()):
        named = zip(drawn.plan.tables, drawn.layers, strict=True)
        refuse_taken(module, {table.name: some for table, some in named}, f"{number}.")
    return drawn


def _others(job: Job, drawn: BoundPlan) -> list[Tensor]:
    """What no server keeps, and yet begins alike everywhere: frozen parameters and buffers."""
    kept = {id(parameter) for parameter in drawn.dense}
    modules = [plan.module for plan in job.models]
    parameters = [p.detach() for m in modules for p in m.parameters() if id(p) not in kept]
    shares = job.strategy.broadcast_buffers
    buffers = [b for m in modules for b in m.buffers() if shares]
    return [t for t in (*parameters, *buffers) if t.numel()]


def _first_rows(drawn: BoundPlan) -> dict[int, tuple[Ids, Floats]]:
    """The rows of layers that are moved onto tables."""
    rows: dict[int, tuple[Ids, Floats]] = {}
    for number, layers in enumerate(drawn.layers):
        if is_movable(layers[0]):
            values = rows_of(layers[0])  # type: ignore[arg-type]
            rows[number] = np.arange(len(values), dtype=np.int64), values
    return rows


def _number(optimizers: list[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> int:
    for number, one in enumerate(optimizers):
        if one is optimizer:
            return number
    raise PlanError(
        "this optimizer was registered after training had begun; call fleet.distributed_optimizer "
        "before fleet.init_worker() and the first forward"
    )


def _flat_gradient(parameter: nn.Parameter) -> NDArray[Any] | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return flat_array(gradient)


def _told(drawn: BoundPlan) -> str:
    plan = drawn.plan
    mode = {
        "sync": "sync",
        "async": "async" if plan.staleness is None else f"async, staleness {plan.staleness}",
        "geo": f"geo, k={plan.k_steps}",
    }[plan.mode]
    elements = sum(parameter.numel() for parameter in drawn.dense)
    tables = ", ".join(f"{t.name} ({t.dim}, {t.rule.name})" for t in plan.tables) or "none"
    return (
        f"{mode}: {counted(plan.worker_num, 'worker')}, {counted(plan.server_num, 'server')}; "
        f"{elements:,} dense elements; tables: {tables}"
    )
