# SPDX-License-Identifier: Apache-2.0
"""Static programs of a collective job: rewriting, agreement among the workers, and steps."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from torch import Tensor, nn

from fleetlight.collective.data_parallel import consistency
from fleetlight.collective.group import Group
from fleetlight.collective.local_training.outer import Means
from fleetlight.errors import PlanError
from fleetlight.fleet.collective.program_passes import passes_of
from fleetlight.fleet.collective.program_reducer import ProgramReducer
from fleetlight.fleet.collective.steps import ReducedSteps
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.consistency import settings_of
from fleetlight.fleet.training.dgc import clipping_error, uses_dgc
from fleetlight.fleet.training.model import ManagedModel, explain_deadline
from fleetlight.fleet.training.optimizer import ManagedOptimizer
from fleetlight.fleet.training.programs import options_of, remember, tell_of
from fleetlight.fleet.training.registering import has_all_of
from fleetlight.fleet.training.worker_seeds import derive_worker_seeds
from fleetlight.observe.log import logger
from fleetlight.static.graph.fingerprint import digest, entries, first_difference
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.state import Slot
from fleetlight.static.program import Program
from fleetlight.static.running.runners import EVERYTHING, Coder, RunsAlone, make_step
from fleetlight.static.writing.recorder import Part

_AT_FIRST_RUN = (
    "The first run of a program waits for all workers, also after it was rewritten; run the same "
    "program on all of them"
)


class ProgramPolicy:
    """The policy of a model that programs train; its own forward does not change."""

    watches_calls: ClassVar[bool] = False

    def __init__(self) -> None:
        self._reducer: ProgramReducer | None = None
        #: digests of the programs that the workers have agreed on, and their numbers
        self._numbers: dict[str, int] = {}

    def agree(self, model: ManagedModel) -> None:
        group = model.dense_group
        if group.alone:
            return
        model.warn_of_other_device()
        with explain_deadline(_AT_FIRST_RUN):
            consistency.check_same_module(model.module, group, settings_of(model.job))
            _broadcast(_tensors(model), group, "first values of the model")
            self._reducer = ProgramReducer(model.job, group, model.module)

    def run(self, model: ManagedModel, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    def agree_on(self, model: ManagedModel, form: Form) -> int:
        """The number of a program, after all workers have compared theirs."""
        mine = entries(form)
        found = digest(mine)
        if found not in self._numbers:
            group = model.dense_group
            if not group.alone:
                with explain_deadline(_AT_FIRST_RUN):
                    # a worker that runs another program must not read this as a gradient
                    group.assemble("comparing the programs")
                    _check_same_program(mine, found, group)
                    assert self._reducer is not None
                    self._reducer.open(form, len(self._numbers))
            self._numbers[found] = len(self._numbers)
            if group.index == 0:
                for report in form.reports:
                    logger.info("%s", report)
        return self._numbers[found]

    def share(self, model: ManagedModel, state: Iterable[Slot]) -> None:
        """Give all workers the values of worker 0 that belong to the program, not the model."""
        group = model.dense_group
        if group.alone:
            return
        known = {id(tensor) for tensor in _tensors(model)}
        own = () if model.job.strategy.broadcast_buffers else ("buffer",)
        slots = [s for s in state if s.kind in {"parameter", "buffer", "optimizer"} - {*own}]
        for slot in slots:
            # the script may have loaded other tensors since
            slot.refresh()
        tensors = [slot.tensor for slot in slots if id(slot.tensor) not in known]
        _broadcast(tensors, group, "first values of the program")

    def reducing(self, model: ManagedModel, number: int) -> contextlib.AbstractContextManager[None]:
        """Inside the block, a program averages its gradients over the workers.

        In local training they stay as they are.
        """
        if self._reducer is None:
            return contextlib.nullcontext()
        return self._reducer.at(
            model.position, number, alone=model.trains_locally, counts=model.batch_weight > 0
        )

    def means(self, model: ManagedModel) -> Means | None:
        return self._reducer

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

    def weight(self, model: ManagedModel) -> float:
        weight = model.batch_weight
        if model.trains_locally:
            # a short batch counts like any other, and a repeated one counts for zero
            return float(weight > 0)
        # the mean over n workers of gradients n times as large is their sum
        return weight if model.job.averages else weight * model.job.group.size


def _tensors(model: ManagedModel) -> list[Tensor]:
    shares = model.job.strategy.broadcast_buffers
    return [*model.module.parameters(), *(model.module.buffers() if shares else ())]


def _broadcast(tensors: Sequence[Tensor], group: Group, operation: str) -> None:
    """Broadcast by device: counters of steps may be in main memory beside values on a GPU."""
    for kind, same in itertools.groupby(sorted(tensors, key=_device_type), _device_type):
        group.broadcast(list(same), f"{operation} ({kind})")


def _device_type(tensor: Tensor) -> str:
    return tensor.device.type


def _check_same_program(mine: list[tuple[str, str]], found: str, group: Group) -> None:
    """PlanError unless all workers run the same operations: each reduction waits for all."""
    digests = group.gather_bytes(found.encode(), "comparing the programs")
    if len(set(digests)) == 1:
        return
    gathered = group.gather_bytes(msgspec.json.encode(mine), "comparing the programs")
    decoded = [msgspec.json.decode(data, type=list[tuple[str, str]]) for data in gathered]
    differences = (first_difference(decoded[0], other, i) for i, other in enumerate(decoded))
    raise PlanError(
        f"the workers wrote different programs: {next(filter(None, differences))}; write the same "
        "program on all workers"
    )


def register(managed: ManagedOptimizer, program: Program) -> Collection[Part]:
    """Register a program; return the parts of its training that this process writes.

    It checks the model only; `distribute` registers it.
    """
    assert program.model is not None
    if _registered(program.model, managed.job) is None:
        _refuse_shared(program.model, managed.job)
    if program.clips and uses_dgc(managed.job):
        raise clipping_error("clip_norm, clip_value")
    return EVERYTHING


def _registered(module: nn.Module, job: Job) -> ManagedModel | None:
    """The registered model that is, or contains, the model of a program."""
    known = next((m for m in job.models if has_all_of(m.module, module)), None)
    assert known is None or isinstance(known, ManagedModel)
    return known


def _refuse_shared(module: nn.Module, job: Job) -> None:
    """PlanError where only some parameters of the program are in a registered model."""
    known = {id(p) for managed in job.models for p in managed.module.parameters()}
    shared = [name for name, p in module.named_parameters() if id(p) in known]
    if shared:
        raise PlanError(
            f"minimize: the program uses {shared[0]}, which is in a registered model or another "
            "program, and parameters that are not; before the first of these programs is written, "
            "register one module that has them all: fleet.distributed_model(module)"
        )


def distribute(managed: ManagedOptimizer, steps: ReducedSteps, program: Program) -> None:
    """Rewrite a program according to the strategy, so that all workers make its steps."""
    assert program.model is not None
    job = managed.job
    # what may refuse comes first
    known = _registered(program.model, job)
    module = program.model if known is None else known.module
    program.passes, program.options = passes_of(job, module), options_of(job)
    program.runner = ReducedRunner(managed, steps, *_program_model(program, job))
    managed.program = program
    managed.programs.add(program)
    remember(program)


def _program_model(program: Program, job: Job) -> tuple[ManagedModel, ProgramPolicy]:
    """The model of a program and its policy, one for all programs of a registered model."""
    module = program.model
    assert module is not None
    known = _registered(module, job)
    if known is not None and isinstance(known.policy, ProgramPolicy):
        return known, known.policy
    policy = ProgramPolicy()
    if known is None:
        known = ManagedModel(module, job, policy)
        known.is_from_program = True
        job.models.append(known)
    else:
        known.set_policy(policy)
    return known, policy


class ReducedRunner(RunsAlone):
    """Makes the steps of a program, and of those rewritten from it, with the other workers."""

    def __init__(
        self,
        managed: ManagedOptimizer,
        steps: ReducedSteps,
        model: ManagedModel,
        policy: ProgramPolicy,
    ) -> None:
        self._managed, self._steps, self._model, self._policy = managed, steps, model, policy
        self._has_shared = False
        #: by program: the form that the workers have agreed on, and its number
        self._agreed: weakref.WeakKeyDictionary[Program, tuple[Form, int]] = (
            weakref.WeakKeyDictionary()
        )

    def start(self, program: Program) -> None:
        """Agree on the program; every worker calls it, and a second call does nothing."""
        self._agree(program)

    def run(
        self, program: Program, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Make a step with gradients averaged over the workers."""
        number = self._agree(program)
        derive_worker_seeds(self._managed.job)
        tell_of(program, self._managed.job)
        self._steps.before_program_step()
        for slot in program.state:
            if slot.kind == "weight":
                slot.tensor.fill_(self._model.weight)
        with self._policy.reducing(self._model, number):
            # the schedule of local training may depend on the loss
            local = self._steps.local_steps
            asked = [*wanted, "loss"] if local is not None and local.wants_loss else wanted
            out, stepped = make_step(program, coder, feeds, asked)
        if stepped:
            self._steps.count_step(out[-1] if len(asked) > len(wanted) else None)
        return out[: len(wanted)]

    def _agree(self, program: Program) -> int:
        """The number of the program in its present form; the workers agree on a new form."""
        form, known = program.form, self._agreed.get(program)
        if known is None or known[0] is not form:
            self._model.freeze()
            known = self._agreed[program] = form, self._policy.agree_on(self._model, form)
            self._managed.programs.add(program)
        if not self._has_shared:
            self._policy.share(self._model, form.state)
            self._has_shared = True
        return known[1]
