# SPDX-License-Identifier: Apache-2.0
"""`Schedulers`: the learning-rate schedulers that the script gave to `fleet.attach`."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fleetlight.errors import CheckpointError
from fleetlight.observe.log import logger
from fleetlight.torch_compat.optimizers import has_scheduler

States = Sequence[Mapping[str, Any]]


class Schedulers:
    """The attached schedulers, in the order of the script."""

    def __init__(self) -> None:
        self._attached: list[LRScheduler] = []
        #: numbers of the optimizers with a warning
        self._warned: set[int] = set()

    def attach(self, scheduler: LRScheduler) -> None:
        """Save and resume a scheduler with the job; a second call does nothing."""
        if not any(scheduler is one for one in self._attached):
            self._attached.append(scheduler)

    def of(self, optimizers: Collection[torch.optim.Optimizer]) -> list[LRScheduler]:
        """The attached schedulers of some optimizers."""
        known = {id(optimizer) for optimizer in optimizers}
        return [one for one in self._attached if id(getattr(one, "optimizer", None)) in known]

    def warn_of_unattached(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Warn once of each optimizer whose scheduler would restart when the job resumes."""
        for number in self._unattached(optimizers):
            if number not in self._warned:
                self._warned.add(number)
                logger.warning(
                    "a learning-rate scheduler of optimizer %d is not attached, so it is not saved "
                    "with the job; call fleet.attach(scheduler=scheduler) after making it",
                    number,
                )

    def _unattached(self, optimizers: Collection[torch.optim.Optimizer]) -> list[int]:
        attached = {id(one.optimizer) for one in self.of(optimizers)}
        return [
            number
            for number, optimizer in enumerate(optimizers)
            if id(optimizer) not in attached and has_scheduler(optimizer)
        ]

    def states(self, optimizers: Collection[torch.optim.Optimizer]) -> list[dict[str, Any]]:
        """The class and the state of each scheduler."""
        return [
            {"class": type(one).__name__, "state": one.state_dict()} for one in self.of(optimizers)
        ]

    def load(self, states: States, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Load the states of a checkpoint."""
        if left := self._unattached(optimizers):
            raise CheckpointError(
                f"a learning-rate scheduler of optimizer {left[0]} is not attached, so it would "
                "restart while the job resumes; call fleet.attach(scheduler=scheduler) after "
                "making it, before the first batch"
            )
        there = self.of(optimizers)
        mine = [type(one).__name__ for one in there]
        saved = [str(state["class"]) for state in states]
        if mine != saved:
            raise CheckpointError(
                f"the checkpoint was saved with the schedulers {_listed(saved)}, this job has "
                f"{_listed(mine)}; attach the same ones in the same order, before the first batch: "
                "fleet.attach(scheduler=scheduler)"
            )
        for one, state in zip(there, states, strict=True):
            one.load_state_dict(_in_its_types(one, state["state"]))
        if there:
            logger.debug("schedulers resume: %s", _listed(mine))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _in_its_types(scheduler: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
    """Restore Counters, such as milestones: a checkpoint stores them as plain dicts."""
    return {
        name: collections.Counter(value)
        if isinstance(getattr(scheduler, name, None), collections.Counter)
        else value
        for name, value in state.items()
    }
