# SPDX-License-Identifier: Apache-2.0
"""`ServerSession`: a worker's connection to its servers, from the first forward to the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.collective.group import Group
from fleetlight.errors import PlanError, counted, first_names
from fleetlight.fleet.exit.exit_status import report_expendable
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts import summaries
from fleetlight.fleet.plan.bound_plan import BoundPlan, bound_plan_of
from fleetlight.fleet.plan.durability_dir import durable_of
from fleetlight.fleet.plan.remote_embedding import RemoteEmbedding, is_movable, rows_of
from fleetlight.fleet.served.dense_group import form_dense_group
from fleetlight.fleet.served.partial_state import warn_of_pickle, watch_state_dicts
from fleetlight.kernels import all_finite
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.step_times import PUSH, step_times
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.layers.caching.device_cache import DeviceCache
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.handle import RowSource, TableHandle
from fleetlight.ps.layers.staging import is_on_device, staging_of
from fleetlight.ps.layers.table_gradient import TableGradient, as_one
from fleetlight.ps.layers.table_weight import stand_for
from fleetlight.ps.rendezvous.client import RendezvousClient
from fleetlight.ps.server.server import Server
from fleetlight.ps.tables.optimizers import PushOptions
from fleetlight.ps.update import Floats, Ids, TableGradients, Update
from fleetlight.ps.worker.cached_rows import CachedRows
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator import Communicator, open_communicator
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.strategy import ASyncConfigs

#: the number of parameters in a warning
_NAMED = 3
#: tables that the line about the start of training names
_TABLES = 4


class ServerSession:
    """Moves values between the script's objects and the communicator, by the plan."""

    def __init__(self, client: Client, embedded: Server | None) -> None:
        self.client = client
        #: called once, before the communicator pulls its first values
        self.before_start: Callable[[Communicator], None] = lambda communicator: None
        self.trainer_guard = SingleTrainerGuard()
        #: the server object in a job of one process
        self.embedded = embedded
        #: the workers that average dense gradients among themselves, where the servers do not
        self.dense_group: Group | None = None
        #: where this worker reports a failure, besides the servers
        self.rendezvous: RendezvousClient | None = None
        #: True once this worker makes no more steps
        self.is_over = False
        #: True once the others know how this worker ended
        self._has_left = False
        self._bound: BoundPlan | None = None
        self._communicator: Communicator | None = None
        self._local_parameters: LocalParameters | None = None
        #: the settings at `open`
        self._configs = ASyncConfigs()
        #: by optimizer: the clipped update of its next step
        self._clipped: dict[int, Update] = {}
        #: by optimizer: the settings of its param groups
        self._options: dict[int, list[PushOptions]] = {}
        #: the handles of all layers
        self._handles: list[TableHandle] = []
        #: the dense parameters with a warning of lost writes
        self._warned: set[int] = set()
        self._has_warned_of_clip = False

    @property
    def is_open(self) -> bool:
        """True once the servers have the plan and the first values."""
        return self._communicator is not None

    @property
    def bound(self) -> BoundPlan:
        """The plan, with the objects of this process."""
        assert self._bound is not None, "the session is not open"
        return self._bound

    @property
    def communicator(self) -> Communicator:
        """Pulls and pushes values."""
        assert self._communicator is not None, "the session is not open"
        return self._communicator

    @property
    def local_parameters(self) -> LocalParameters:
        """The dense parameters of this worker."""
        assert self._local_parameters is not None, "the session is not open"
        return self._local_parameters

    def open(self, job: Job) -> None:
        """Agree with the servers on the plan, and set the first values; once."""
        if self.is_open:
            return
        self._bound = bound = bound_plan_of(job)
        _check_elastic(job, bound)
        if self.embedded is not None:
            durable = durable_of(job)
            self.embedded.open(bound.plan, bound.optimizers, bound.dense, durable=durable)
        self.client.join(bound.plan)
        if bound.plan.durability != "none":
            durability = job.strategy.durability_configs
            self.client.expect_restarts(durability.away_within(job.group.deadline_s))
            self._warn_of_late_durability(job, bound)
        self._local_parameters = LocalParameters(bound.dense)
        if job.group.index == 0:
            self.client.replies.once("first values", lambda: self._fill(bound))
        if not bound.plan.serves_dense and job.role.worker_num > 1:
            self.dense_group = form_dense_group(job)
        job.group.broadcast(_unserved_tensors(job, bound), "first values of the model")
        job.group.barrier("init_worker")
        self._configs = configs = job.strategy.a_sync_configs
        self._communicator = open_communicator(
            self.client,
            self._local_parameters,
            queue_size=configs.send_queue_size if configs.has_queue else None,
            max_merge=configs.max_merge,
            cache_rows=configs.cache_rows,
        )
        self._attach_layers()
        layers = [layer for some in bound.layers for layer in some]
        watch_state_dicts([managed.module for managed in job.models], layers)
        self.before_start(self._communicator)
        self._communicator.start()
        may_leave = bound.plan.lost_worker == "go_on" or job.role.is_elastic
        if may_leave and job.group.index:
            report_expendable(job.role)
        logger.info("%s", _summary(bound))

    def _warn_of_late_durability(self, job: Job, bound: BoundPlan) -> None:
        """Warn if a restart of this worker alone needs a log that `fleet.init` did not open."""
        if job.role.max_restarts and bound.plan.serves_dense and not self.client.journal.is_stored:
            logger.warning(
                "strategy.durability was set after fleet.init: servers restart alone, but a killed "
                "worker restarts only together with all processes; give the strategy to "
                "fleet.init(strategy=...) to let workers restart alone, too"
            )

    def _fill(self, bound: BoundPlan) -> Sequence[bytes]:
        self.client.fill(_first_rows(bound), self.local_parameters)
        return ()

    def _attach_layers(self) -> None:
        """Connect each layer to its table."""
        source = self._source_of_rows()
        for number, layers in enumerate(self.bound.layers):
            table = self.bound.plan.tables[number]
            handle = TableHandle(number, table, source, warn_of_pickle)
            self._handles.append(handle)
            for layer in layers:
                if isinstance(layer, TableLayer):
                    layer.handle = handle
                    # load_state_dict(assign=True) may have made it a plain Parameter
                    stand_for(layer.weight, handle.plan.name)
                elif is_movable(layer):
                    RemoteEmbedding(layer, handle)  # type: ignore[arg-type]
        # the servers have the optimizer state of rows
        for optimizer in self.bound.optimizers:
            for weight in (w for n in range(len(self.bound.layers)) for w in self.bound.weights(n)):
                optimizer.state.pop(weight, None)

    def _source_of_rows(self) -> RowSource:
        """The communicator, or the rows that layers keep on their device before it."""
        caches = {
            number: DeviceCache(layer.dim, layer.cache_rows, _device_of(layer))
            for number, [layer, *_] in enumerate(self.bound.layers)
            if isinstance(layer, TableLayer) and layer.cache is not None
        }
        if not caches:
            return self.communicator
        self.communicator.cached = CachedRows(self.communicator, caches)
        return self.communicator.cached

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """The number of a registered optimizer."""
        return _number(self.bound.optimizers, optimizer)

    def steps_dense(self, optimizer: torch.optim.Optimizer) -> bool:
        """True when an optimizer steps dense parameters."""
        number = self.number_of(optimizer)
        return any(dense.optimizer == number for dense in self.bound.plan.dense)

    def collect(self, optimizer: torch.optim.Optimizer, step: int) -> Update:
        """The update of a step: the present gradients, and the settings of the param groups."""
        tables = self._table_gradients(self.number_of(optimizer))
        return self.update(optimizer, step, tables, lambda parameter: parameter.grad)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        step: int,
        tables: dict[int, TableGradients],
        gradient_of: Callable[[nn.Parameter], Tensor | None],
    ) -> Update:
        """The update of a step with these gradients of tables, by number, and of parameters."""
        bound = self.bound
        number = self.number_of(optimizer)
        return Update(
            optimizer=number,
            step=step,
            options=self._options_of(number, optimizer),
            tables=tables,
            dense=_flat_gradients(
                {
                    index: gradient_of(parameter)
                    for index, parameter in enumerate(bound.dense)
                    if bound.plan.serves_dense and bound.plan.dense[index].optimizer == number
                }
            ),
        )

    def _options_of(self, number: int, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        known = self._options.setdefault(number, [])
        while len(known) < len(optimizer.param_groups):
            known.append(PushOptions())
        return [
            options.of(group) for options, group in zip(known, optimizer.param_groups, strict=False)
        ]

    def _table_gradients(self, optimizer: int) -> dict[int, TableGradients]:
        plan, found = self.bound.plan, {}
        for number, table in enumerate(plan.tables):
            if table.optimizer != optimizer:
                continue
            weights = self.bound.weights(number)
            grads = [w.grad for w in weights if isinstance(w.grad, TableGradient)]
            self._warn_of_local_clip(table.name, grads)
            parts = [part for gradient in grads for part in gradient.parts]
            merged = as_one(parts, plan.server_num)
            if merged is not None:
                found[number] = merged
        return found

    def _warn_of_local_clip(self, table: str, gradients: list[TableGradient]) -> None:
        """Warn once of a local clip in sync mode, whose step must equal that of one process."""
        plan = self.bound.plan
        if self._has_warned_of_clip or not plan.steps_together or plan.worker_num == 1:
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

    def drop_nonfinite(self, update: Update) -> bool:
        """Drop a step whose gradients are not finite; False for others. May raise GradientError."""
        plan = self.bound.plan
        if not plan.pushes_alone or plan.on_nonfinite == "apply" or update.skip:
            return False
        arrays = [array for array in update.dense.values() if array is not None]
        arrays += [part.gradients for part in update.tables.values()]
        if all(array.dtype != np.uint16 and all_finite(array) for array in arrays):
            return False
        # it raises the error, or marks the update as skipped
        return self.client.build_push(update, self.local_parameters).skip

    def step(self, update: Update) -> bool:
        """Send an update; returns False when all workers drop the step for an infinity."""
        self._warn_of_lost_values()
        clipped = self._clipped.pop(update.optimizer, None)
        if clipped is not None:
            # the script may have cleared the gradients since, but the others wait for this step
            clipped.skip = update.skip or update.is_empty
            clipped.resume_point = update.resume_point
            update = clipped
        with step_times.part(PUSH):
            return self.communicator.step(update)

    def _warn_of_lost_values(self) -> None:
        """Warn once of values that the script wrote into parameters stored on servers."""
        plan = self.bound.plan
        if plan.workers_step_dense or not plan.serves_dense:
            return
        lost = [n for n in self.local_parameters.written() if n not in self._warned]
        if lost:
            self._warned.update(lost)
            names = first_names([plan.dense[n].name for n in lost], _NAMED)
            logger.warning(
                "%s: written to since the last step, but the servers store the values of dense "
                "parameters, and theirs replace the written ones; call load_state_dict before "
                "fleet.init_worker(), or load values with fleet.load_state_dict or "
                "fleet.load_persistables (ignore this if the script restored the old values)",
                names,
            )

    def barrier(self, job: Job) -> None:
        """Wait for all workers, and make them equal."""
        if self.is_open:
            self._warn_of_lost_values()
            self.communicator.settle()
        job.group.barrier("barrier_worker")
        if self.is_open:
            self.communicator.resume()
            if not self.bound.plan.steps_together:
                # a push before all have the values would make them differ
                job.group.barrier("barrier_worker")

    def stop(self) -> None:
        """Wait until all pushes of this worker are applied, and log its metrics."""
        self.is_over = True
        if self.is_open:
            self.communicator.stop()
            logger.info("%s", summaries.worker_summary(self.communicator.metrics()))
            if self.client.worker == 0:
                totals = self.client.metrics()
                logger.info("%s", summaries.servers_summary(totals))
                warning = summaries.staleness_warning(totals, self.bound.plan, self._configs)
                if warning and self.client.has_fixed_workers:
                    logger.warning("%s", warning)

    def leave(self) -> None:
        """Leave the workers that averaged with this one."""
        if not self._mark_left():
            return
        if self.dense_group is not None:
            self.dense_group.leave()

    def release_layers(self) -> None:
        """Disconnect layers from their tables."""
        for handle in self._handles:
            handle.close()
        self._handles.clear()

    def fail(self, error: str) -> None:
        """Leave after an error, and send it to them; only the first report counts."""
        if not self._mark_left():
            return
        if self.rendezvous is not None:
            self.rendezvous.depart(self.client.worker, error)
        if self.dense_group is not None:
            self.dense_group.fail(error)

    @property
    def has_left(self) -> bool:
        """True once this worker has left the job."""
        return self._has_left

    def _mark_left(self) -> bool:
        """Mark this worker as gone; returns True the first time."""
        before, self._has_left = self._has_left, True
        return not before

    def clip(self, updates: list[Update], max_norm: float, norm_type: float) -> float:
        """Clip the gradients of the next steps to `max_norm`; returns their norm."""
        if not self.bound.plan.serves_dense:
            raise PlanError(
                "clip_grad_norm_: with dense='allreduce' dense gradients stay in the workers, and "
                "those of tables go to servers; clip the dense ones with "
                "torch.nn.utils.clip_grad_norm_"
            )
        total = self.communicator.clip(updates, max_norm, norm_type)
        self._clipped.update({update.optimizer: update for update in updates})
        if self.bound.plan.workers_step_dense:
            self._set_gradients(updates)
        return total

    def _set_gradients(self, updates: list[Update]) -> None:
        """Copy clipped gradients back for torch's own step, since updates may be copies."""
        for update in updates:
            for number, values in update.dense.items():
                gradient = self.bound.dense[number].grad
                if values is not None and gradient is not None and not gradient.is_sparse:
                    gradient.copy_(as_tensor(values, gradient.dtype).view(gradient.shape))


class SingleTrainerGuard:
    """Refuses a step while another thread is inside a step of this worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: held during a step, where another thread reads values between two steps
        self.gate: threading.Lock | None = None
        self._held: threading.Lock | None = None

    def begin(self) -> None:
        """Begin a step; PlanError during a step of another thread."""
        me = threading.current_thread()
        with self._lock:
            other = self._thread
            # a thread may have died during its step
            if other is not None and other is not me and other.is_alive():
                raise PlanError(
                    f"optimizer.step was called by thread {me.name} while thread {other.name} was "
                    "inside optimizer.step, expected one step at a time: two threads that train "
                    "mix their gradients; train in one thread (others may call the model under "
                    "torch.no_grad()), hold a lock from forward to step, or start more workers "
                    "(fleetrun --worker_num)"
                )
            self._thread = me
        if self.gate is not None and self._held is None:
            self.gate.acquire()
            self._held = self.gate

    def end(self) -> None:
        """End a step."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
        self._thread = None


def _check_elastic(job: Job, bound: BoundPlan) -> None:
    if job.role.is_elastic and not bound.plan.serves_dense:
        raise PlanError(
            "workers may join and leave while this job runs, but with dense='allreduce' they form "
            "a group of fixed size; leave dense out, so that the servers have the dense values"
        )


def _unserved_tensors(job: Job, bound: BoundPlan) -> list[Tensor]:
    """Frozen parameters and buffers: no server has them, and all workers begin with equal ones."""
    served = {id(parameter) for parameter in bound.dense}
    modules = [managed.module for managed in job.models]
    parameters = [p.detach() for m in modules for p in m.parameters() if id(p) not in served]
    shares = job.strategy.broadcast_buffers
    buffers = [b for m in modules for b in m.buffers() if shares]
    return [t for t in (*parameters, *buffers) if t.numel()]


def _first_rows(bound: BoundPlan) -> dict[int, tuple[Ids, Floats]]:
    """The rows of torch's layers that move onto tables."""
    rows: dict[int, tuple[Ids, Floats]] = {}
    for number, layers in enumerate(bound.layers):
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
        "before fleet.init_worker() and before the first forward"
    )


def _device_of(layer: TableLayer) -> Callable[[], torch.device]:
    return lambda: layer.weight.device


def _flat_gradients(gradients: Mapping[int, Tensor | None]) -> dict[int, NDArray[Any] | None]:
    """The gradients of parameters; those on a device are copied together."""
    found = {index: _whole(gradient) for index, gradient in gradients.items()}
    arrivals = {
        index: staging_of(gradient.device).to_host(gradient)
        for index, gradient in found.items()
        if gradient is not None and is_on_device(gradient)
    }
    for index, arrival in arrivals.items():
        found[index] = arrival()
    return {index: None if one is None else flat_array(one) for index, one in found.items()}


def _whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _summary(bound: BoundPlan) -> str:
    plan = bound.plan
    mode = {
        "sync": "sync",
        "async": "async" if plan.staleness is None else f"async, staleness {plan.staleness}",
        "geo": f"geo, k={plan.k_steps}",
    }[plan.mode]
    elements = sum(parameter.numel() for parameter in bound.dense)
    names = [f"{table.name} ({table.dim}, {table.rule.name})" for table in plan.tables]
    tables = first_names(names, _TABLES) or "none"
    return (
        f"{mode}: {counted(plan.worker_num, 'worker')}, {counted(plan.server_num, 'server')}; "
        f"{elements:,} dense elements; tables: {tables}"
    )
