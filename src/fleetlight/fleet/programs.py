# SPDX-License-Identifier: Apache-2.0
"""Static programs of a job: what a registered optimizer does with a program that it is to step."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor, nn

from fleetlight.collective import agreement
from fleetlight.collective.group import Group
from fleetlight.errors import PlanError
from fleetlight.fleet.context import Context
from fleetlight.fleet.model import ModelPlan
from fleetlight.fleet.program_passes import options_of, passes_of
from fleetlight.fleet.registering import refuse_shared_parameters
from fleetlight.fleet.summing import Summing
from fleetlight.fleet.terms import settings_of
from fleetlight.observe.log import logger
from fleetlight.static.graph.fingerprint import digest, entries, first_difference
from fleetlight.static.program import Program
from fleetlight.static.running.runners import EVERYTHING, Coder, make_step
from fleetlight.static.writing.recorder import Part

if TYPE_CHECKING:
    from fleetlight.fleet.optimizer import OptimizerPlan

#: the program that was given to a registered optimizer last
_main: Program | None = None


def main_program() -> Program:
    """The program that `minimize` of a registered optimizer has completed last."""
    if _main is None:
        raise PlanError(
            "fleet.main_program: there is no program yet; there is one after "
            "optimizer.minimize(loss), with the optimizer that fleet.distributed_optimizer answered"
        )
    return _main


def remember(program: Program) -> None:
    """It is the main program from now on."""
    global _main
    _main = program


class ProgramModel(ModelPlan):
    """A registered model that a program trains; its own forward stays what it is."""

    def __init__(self, module: nn.Module, context: Context, program: Program) -> None:
        super().__init__(module, context)
        self.program = program
        self._summing: Summing | None = None

    def _stand_in(self) -> None:
        """Calls of the module are not the job's business."""

    def freeze(self) -> None:
        """Agree with the other workers on model and program, and begin with the same values."""
        if not self.frozen:
            self._agree()
            self.frozen = True
            if self._context.group.index == 0:
                for report in self.program.reports:
                    logger.info("%s", report)

    def _agree(self) -> None:
        group = self._dense_group()
        if group.alone:
            return
        self._warn_of_other_device()
        agreement.check_same_module(self.module, group, settings_of(self._context))
        _check_same_program(entries(self.program.form), group)
        tensors = [s.tensor for s in self.program.state if s.kind != "rate"]
        group.broadcast(tensors, "first values of the program")
        self._summing = Summing(self._context, group)

    def reducing(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, the program's gradients become means over the workers."""
        if self._summing is None:
            return contextlib.nullcontext()
        return self._summing.at(self._position)

    def close(self) -> None:
        """Let go of what reduces its gradients."""
        super().close()
        if self._summing is not None:
            self._summing.close()
            self._summing = None

    @property
    def weight(self) -> float:
        """What the gradients of the coming batch weigh."""
        # the mean over the workers of gradients as many times as large is their sum
        return self._weight if self._context.averages else self._weight * self._context.group.size


def _check_same_program(mine: list[tuple[str, str]], group: Group) -> None:
    """All workers must run the same operations: a reduction of one waits for that of the others."""
    digests = group.gather_bytes(digest(mine).encode(), "comparing the programs")
    if len(set(digests)) == 1:
        return
    everybody = group.gather_bytes(msgspec.json.encode(mine), "comparing the programs")
    decoded = [msgspec.json.decode(data, type=list[tuple[str, str]]) for data in everybody]
    differences = (first_difference(decoded[0], other, i) for i, other in enumerate(decoded))
    raise PlanError(
        f"the workers wrote different programs: {next(filter(None, differences))}; write the same "
        "program on all workers"
    )


def takes(plan: OptimizerPlan, program: Program) -> Collection[Part]:
    """Register the program's model; answers what of its training this process writes."""
    assert program.model is not None
    context = plan.context
    model = ProgramModel(program.model, context, program)
    known = [m for m in context.models if m.module is program.model]
    if known:
        known[0].close()
        context.models[context.models.index(known[0])] = model
    else:
        refuse_shared_parameters(program.model, context)
        context.models.append(model)
    plan.program = program
    return EVERYTHING


def distribute(plan: OptimizerPlan, program: Program) -> None:
    """Rewrite a program as the strategy says, and have its steps made by all workers."""
    remember(program)
    context = plan.context
    model = next(m for m in context.models if m.module is program.model)
    assert isinstance(model, ProgramModel)
    program.passes = passes_of(context)
    program.options = options_of(context)
    program.runner = Together(plan, model)


class Together:
    """Makes the steps of a program with the other workers."""

    def __init__(self, plan: OptimizerPlan, model: ProgramModel) -> None:
        self._plan, self._model = plan, model

    def start(self, program: Program) -> None:
        """All workers come here; twice is fine."""
        self._model.freeze()

    def run(
        self, program: Program, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """A step, its gradients averaged over the workers."""
        self.start(program)
        for slot in program.state:
            if slot.kind == "weight":
                slot.tensor.fill_(self._model.weight)
        with self._model.reducing():
            out, stepped = make_step(program, coder, feeds, wanted)
        if stepped:
            self._plan.count_step()
        return out
