# SPDX-License-Identifier: Apache-2.0
"""Static programs of a job: what a registered optimizer does with a program that it is to step."""

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
from fleetlight.fleet.training.model import ModelPlan, saying_who_meets
from fleetlight.fleet.training.optimizer import StepPlan
from fleetlight.fleet.training.programs import options_of, remember
from fleetlight.fleet.training.registering import has_all_of
from fleetlight.fleet.training.worker_seeds import make_distinct
from fleetlight.observe.log import logger
from fleetlight.static.graph.fingerprint import digest, entries, first_difference
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.state import Slot
from fleetlight.static.program import Program
from fleetlight.static.running.runners import EVERYTHING, Coder, make_step
from fleetlight.static.writing.recorder import Part

_AT_FIRST_RUN = (
    "At the first run of a program all workers meet, and again when it was rewritten; run the same "
    "program on all of them"
)


class ProgramPolicy:
    """The policy of a model that programs train; its own forward stays what it is."""

    watches_calls: ClassVar[bool] = False

    def __init__(self) -> None:
        self._summing: ProgramReducer | None = None
        #: digests of the programs that the workers have agreed on, and their numbers
        self._numbers: dict[str, int] = {}

    def agree(self, plan: ModelPlan) -> None:
        """Agree with the other workers on the model, and begin with the same values."""
        group = plan.dense_group
        if group.alone:
            return
        plan.warn_of_other_device()
        with saying_who_meets(_AT_FIRST_RUN):
            consistency.check_same_module(plan.module, group, settings_of(plan.job))
            _broadcast(_tensors(plan), group, "first values of the model")
            self._summing = ProgramReducer(plan.job, group, plan.module)

    def run(self, plan: ModelPlan, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls of the module are not the job's business."""
        return inner(*args, **kwargs)

    def agree_on(self, plan: ModelPlan, form: Form) -> int:
        """The number of a program, after all workers have found theirs to be the same."""
        mine = entries(form)
        found = digest(mine)
        if found not in self._numbers:
            group = plan.dense_group
            if not group.alone:
                with saying_who_meets(_AT_FIRST_RUN):
                    # somebody who runs another one must not take this for a gradient
                    group.assemble("comparing the programs")
                    _check_same_program(mine, found, group)
                    assert self._summing is not None
                    self._summing.open(form, len(self._numbers))
            self._numbers[found] = len(self._numbers)
            if group.index == 0:
                for report in form.reports:
                    logger.info("%s", report)
        return self._numbers[found]

    def share(self, plan: ModelPlan, state: Iterable[Slot]) -> None:
        """Bring worker 0's values of what a program trains beside the model to all workers."""
        group = plan.dense_group
        if group.alone:
            return
        known = {id(tensor) for tensor in _tensors(plan)}
        own = () if plan.job.strategy.broadcast_buffers else ("buffer",)
        slots = [s for s in state if s.kind in {"parameter", "buffer", "optimizer"} - {*own}]
        for slot in slots:
            # somebody may have loaded other tensors since
            slot.refresh()
        tensors = [slot.tensor for slot in slots if id(slot.tensor) not in known]
        _broadcast(tensors, group, "first values of the program")

    def reducing(self, plan: ModelPlan, number: int) -> contextlib.AbstractContextManager[None]:
        """Inside the block, the gradients of a program become means over the workers.

        Where this worker trains alone they are its own.
        """
        if self._summing is None:
            return contextlib.nullcontext()
        return self._summing.at(
            plan.position, number, alone=plan.trains_alone, counts=plan.batch_weight > 0
        )

    def means(self, plan: ModelPlan) -> Means | None:
        """As in `ModelPolicy`."""
        return self._summing

    def close(self) -> None:
        """Let go of what reduces its gradients."""
        if self._summing is not None:
            self._summing.close()
            self._summing = None

    def weight(self, plan: ModelPlan) -> float:
        """As in `ModelPolicy`; the program applies it."""
        weight = plan.batch_weight
        if plan.trains_alone:
            # a short batch is like any other; one that repeats a record counts for nothing
            return float(weight > 0)
        # the mean over the workers of gradients as many times as large is their sum
        return weight if plan.job.averages else weight * plan.job.group.size


def _tensors(plan: ModelPlan) -> list[Tensor]:
    shares = plan.job.strategy.broadcast_buffers
    return [*plan.module.parameters(), *(plan.module.buffers() if shares else ())]


def _broadcast(tensors: Sequence[Tensor], group: Group, operation: str) -> None:
    """Worker 0's values for all; what counts steps may be in main memory, and the rest not."""
    for kind, alike in itertools.groupby(sorted(tensors, key=_kind), _kind):
        group.broadcast(list(alike), f"{operation} ({kind})")


def _kind(tensor: Tensor) -> str:
    return tensor.device.type


def _check_same_program(mine: list[tuple[str, str]], found: str, group: Group) -> None:
    """All workers must run the same operations: a reduction of one waits for that of the others."""
    digests = group.gather_bytes(found.encode(), "comparing the programs")
    if len(set(digests)) == 1:
        return
    everybody = group.gather_bytes(msgspec.json.encode(mine), "comparing the programs")
    decoded = [msgspec.json.decode(data, type=list[tuple[str, str]]) for data in everybody]
    differences = (first_difference(decoded[0], other, i) for i, other in enumerate(decoded))
    raise PlanError(
        f"the workers wrote different programs: {next(filter(None, differences))}; write the same "
        "program on all workers"
    )


def takes(plan: StepPlan, program: Program) -> Collection[Part]:
    """Answers what of a program's training this process writes; registers nothing yet."""
    assert program.model is not None
    if _registered(program.model, plan.job) is None:
        _refuse_shared(program.model, plan.job)
    if program.clips and uses_dgc(plan.job):
        raise clipping_error("clip_norm, clip_value")
    return EVERYTHING


def _registered(module: nn.Module, job: Job) -> ModelPlan | None:
    """The registered model that the program's is, or is a part of."""
    known = next((m for m in job.models if has_all_of(m.module, module)), None)
    assert known is None or isinstance(known, ModelPlan)
    return known


def _refuse_shared(module: nn.Module, job: Job) -> None:
    """The model that a parameter belongs to must have all that the program uses."""
    known = {id(p) for plan in job.models for p in plan.module.parameters()}
    shared = [name for name, p in module.named_parameters() if id(p) in known]
    if shared:
        raise PlanError(
            f"minimize: the program uses {shared[0]}, which is in a registered model or another "
            "program, beside parameters that are not; before the first of these programs is "
            "written, register one module that has them all: fleet.distributed_model(module)"
        )


def distribute(plan: StepPlan, steps: ReducedSteps, program: Program) -> None:
    """Rewrite a program as the strategy says, and have its steps made by all workers."""
    assert program.model is not None
    job = plan.job
    # what may refuse comes first
    known = _registered(program.model, job)
    module = program.model if known is None else known.module
    program.passes, program.options = passes_of(job, module), options_of(job)
    program.runner = ReducedRunner(plan, steps, *_program_model(program, job))
    plan.program = program
    plan.programs.add(program)
    remember(program)


def _program_model(program: Program, job: Job) -> tuple[ModelPlan, ProgramPolicy]:
    """One for all programs of a registered model, in the place of what trains it eagerly."""
    module = program.model
    assert module is not None
    known = _registered(module, job)
    if known is not None and isinstance(known.policy, ProgramPolicy):
        return known, known.policy
    policy = ProgramPolicy()
    if known is None:
        known = ModelPlan(module, job, policy)
        known.of_program, known.former_names = True, program.former_names()
        job.models.append(known)
    else:
        known.become(policy)
    return known, policy


class ReducedRunner:
    """Makes the steps of a program, and of those rewritten from it, with the other workers."""

    def __init__(
        self, plan: StepPlan, steps: ReducedSteps, model: ModelPlan, policy: ProgramPolicy
    ) -> None:
        self._plan, self._steps, self._model, self._policy = plan, steps, model, policy
        self._has_shared = False
        #: what the workers have agreed on last, and its number
        self._agreed: weakref.WeakKeyDictionary[Program, tuple[Form, int]] = (
            weakref.WeakKeyDictionary()
        )

    def start(self, program: Program) -> None:
        """All workers come here; twice is fine."""
        self._agree(program)

    def run(
        self, program: Program, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """A step, its gradients averaged over the workers."""
        number = self._agree(program)
        make_distinct(self._plan.job)
        self._steps.before_program_step()
        for slot in program.state:
            if slot.kind == "weight":
                slot.tensor.fill_(self._model.weight)
        with self._policy.reducing(self._model, number):
            # a schedule of meetings may follow the loss
            alone = self._steps.alone
            asked = [*wanted, "loss"] if alone is not None and alone.wants_loss else wanted
            out, stepped = make_step(program, coder, feeds, asked)
        if stepped:
            self._steps.count_step(out[-1] if len(asked) > len(wanted) else None)
        return out[: len(wanted)]

    def _agree(self, program: Program) -> int:
        """The number of the program as it is now, which nobody has run if it was rewritten."""
        form, known = program.form, self._agreed.get(program)
        if known is None or known[0] is not form:
            self._model.freeze()
            known = self._agreed[program] = form, self._policy.agree_on(self._model, form)
            self._plan.programs.add(program)
        if not self._has_shared:
            self._policy.share(self._model, form.state)
            self._has_shared = True
        return known[1]
