# SPDX-License-Identifier: Apache-2.0
"""What `fleet.attach` makes known: learning-rate schedulers and loss scalers of the script."""

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
    """In the order in which they were attached, which is that of the script."""

    def __init__(self) -> None:
        self._attached: list[LRScheduler] = []
        #: optimizers of which it was said that their scheduler is not attached
        self._warned: set[int] = set()

    def attach(self, scheduler: LRScheduler) -> None:
        """It is saved and resumed with the job; twice is fine."""
        if not any(scheduler is one for one in self._attached):
            self._attached.append(scheduler)

    def of(self, optimizers: Collection[torch.optim.Optimizer]) -> list[LRScheduler]:
        """Those of some optimizers."""
        known = {id(optimizer) for optimizer in optimizers}
        return [one for one in self._attached if id(getattr(one, "optimizer", None)) in known]

    def warn_of_others(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Of optimizers whose scheduler begins anew when the job resumes; once each."""
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
        """What each of them counts and remembers."""
        return [
            {"class": type(one).__name__, "state": one.state_dict()} for one in self.of(optimizers)
        ]

    def load(self, states: States, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Let them go on where those of a checkpoint stood."""
        if left := self._unattached(optimizers):
            raise CheckpointError(
                f"a learning-rate scheduler of optimizer {left[0]} is not attached, so it would "
                "begin anew while the job resumes; call fleet.attach(scheduler=scheduler) after "
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
            logger.debug("schedulers go on: %s", _listed(mine))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _in_its_types(scheduler: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint makes a plain dict of what counts milestones."""
    return {
        name: collections.Counter(value)
        if isinstance(getattr(scheduler, name, None), collections.Counter)
        else value
        for name, value in state.items()
    }
