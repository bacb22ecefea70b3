# SPDX-License-Identifier: Apache-2.0
"""Static programs of a collective job: rewriting, agreement among the workers, and steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn
from torch.futures import Future

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.data_parallel import consistency
from fleetlight.collective.data_parallel.replica import Reduction, reducer_of
from fleetlight.collective.group import Group
from fleetlight.collective.local_training.outer import Means
from fleetlight.collective.reduction.coverage import coded_in
from fleetlight.collective.reduction.reduce_now import reduce_now
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.levels import Groups, levels_of
from fleetlight.collective.routes.routing import takes_levels
from fleetlight.collective.stamp import UNKNOWN, GradientStamp, Position, check_equally_far
from fleetlight.errors import PlanError
from fleetlight.fleet.collective.steps import ReducedSteps
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.consistency import settings_of, terms_of
from fleetlight.fleet.training.dgc import clipping_error, uses_dgc
from fleetlight.fleet.training.local_training import may_train_locally
from fleetlight.fleet.training.model import ManagedModel, explain_deadline, reduction_of
from fleetlight.fleet.training.optimizer import ManagedOptimizer
from fleetlight.fleet.training.programs import options_of, remember, tell_of
from fleetlight.fleet.training.registering import has_all_of
from fleetlight.fleet.training.worker_seeds import derive_worker_seeds
from fleetlight.observe.log import logger
from fleetlight.static import passes
from fleetlight.static.graph.fingerprint import digest, entries, first_difference
from fleetlight.static.graph.form import Form, Pass
from fleetlight.static.graph.state import Slot
from fleetlight.static.ops.reductions import GroupReductions, NoReductions, Parts, reducing
from fleetlight.static.program import Program
from fleetlight.static.rewriting.all_reduces import all_reduces_of, members_of
from fleetlight.static.running.runners import EVERYTHING, Coder, RunsAlone, make_step
from fleetlight.static.writing.recorder import Part


def passes_of(job: Job, model: nn.Module) -> tuple[Pass, ...]:
    """The passes over a program before it runs; `model` is the registered one."""
    reduction: Reduction | None = None
    levels: tuple[Groups, ...] = ()
    group = job.dense_group
    if group is not None and not group.alone:
        reduction = reduction_of(job, model).within(group)
        levels = _levels(group, reduction)
    request = passes.PassRequest(
        strategy=job.strategy,
        model=model,
        reduction=reduction,
        levels=levels,
        trains_alone=may_train_locally(job),
    )
    return passes.chosen(request)


def _levels(group: Group, reduction: Reduction) -> tuple[Groups, ...]:
    """The levels of a hierarchical sum; none where all workers sum at once."""
    levels = [] if reduction.inner is None else levels_of(group.hellos, reduction.inner)
    taken = takes_levels(group, levels, coded=reduction.compression is not None)
    return tuple(levels) if taken else ()


class ProgramReducer:
    """Averages gradients and parameters over the workers for the programs of a model."""

    def __init__(self, job: Job, group: Group, module: nn.Module) -> None:
        self._job, self._group, self._module = job, group, module
        self._reduction = reduction_of(job, module).within(group)
        #: by `inner` of the programs' reductions
        self._reducers: dict[int | None, Reducer] = {}
        self._compression = self._reduction.compression
        if self._compression is not None:
            self._compression.begin()
        self._reductions = GroupReductions(self._reducers, group, self._check, self._arrived)
        #: by program: the parameters in each bucket whose gradients may be compressed
        self._parts: dict[int, Parts] = {}
        self._position, self._program = UNKNOWN, 0

    def open(self, form: Form, program: int) -> None:
        """Make the reducers that a program needs; every worker calls it.

        `program` is its number, equal on all workers.
        """
        self._parts[program] = self._parts_of(form)
        asked = [reduction.inner for reduction in all_reduces_of(form.graph)]
        for inner in dict.fromkeys(asked or [None]):
            if inner not in self._reducers:
                # a pass narrows the buckets that all workers sum at once
                by_pass = inner is None and not may_train_locally(self._job)
                narrow = None if by_pass else self._reduction.narrow
                reduction = dataclasses.replace(self._reduction, inner=inner, narrow=narrow)
                self._reducers[inner] = reducer_of(self._group, reduction)

    def _parts_of(self, form: Form) -> Parts:
        known = {id(parameter): name for name, parameter in self._module.named_parameters()}
        names = {s.name: known.get(id(s.tensor), s.name) for s in form.state}
        members = members_of(form.graph)
        return {
            reduction.index: tuple(
                ParameterSlice(names[str(mark.args[1])], mark.meta["val"].numel())
                for mark in members[reduction.index]
            )
            for reduction in all_reduces_of(form.graph)
            if reduction.is_coded
        }

    def at(
        self, position: Position, program: int, *, alone: bool = False, counts: bool = True
    ) -> AbstractContextManager[None]:
        """Inside the block a program reduces with the others, and sends this worker's position.

        A worker that trains `alone` reduces nothing. A batch that does not count (`counts`) takes
        no part in the statistics of norms.
        """
        self._position, self._program = position, program
        if alone:
            return reducing(NoReductions())
        is_coded = self._compression is not None and self._compression.prepare()
        parts = self._parts[program] if is_coded else {}
        self._reductions.prepare(self._stamp(), parts, counts=counts)
        return reducing(self._reductions)

    def _arrived(self, means: Mapping[str, Tensor]) -> None:
        if self._compression is not None:
            self._compression.correct(means)

    @torch.no_grad()
    def mean(self, named: Mapping[str, Tensor], operation: str) -> None:
        """Average tensors by the reducer of the first program."""
        reducer = next(iter(self._reducers.values()))
        reducer.stamp = self._stamp()

        def settle(reductions: Sequence[Future[Tensor]]) -> None:
            with self._group.named(operation):
                reducer.settle(reductions)
            self._check(reducer.stamps())

        reduce_now(
            reducer,
            named,
            settle,
            limits=self._reduction.limits,
            parameters=dict(self._module.named_parameters()),
            coded=coded_in(self._module, self._compression),
        )

    def _stamp(self) -> GradientStamp:
        return GradientStamp(self._position, consistency.checksum(self._terms()))

    def _check(self, stamps: Mapping[int, GradientStamp]) -> None:
        check_equally_far({index: stamp.position for index, stamp in stamps.items()})
        consistency.check_same_terms(stamps, self._terms(), self._group)

    def _terms(self) -> consistency.Terms:
        return [
            *terms_of(self._job),
            ("the program that runs, in the order of their first runs,", self._program),
        ]

    def close(self) -> None:
        """Close the reducers and the process groups."""
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        del self._reductions


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
