# SPDX-License-Identifier: Apache-2.0
"""The learning-rate schedulers of a script, found without being registered.

Torch's schedulers know their optimizer, but no optimizer knows its schedulers. So those are noted
that are made while a job saves by itself.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fleetlight.errors import CheckpointError
from fleetlight.observe.log import logger

States = Sequence[Mapping[str, Any]]


class Schedulers:
    """In the order in which they were made, which is that of the script."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[LRScheduler]] = []
        made = self._made

        def new(cls: type[LRScheduler], *_: Any, **__: Any) -> LRScheduler:
            scheduler = object.__new__(cls)
            made.append(weakref.ref(scheduler))
            return scheduler

        # not __init__: some classes do not call that of the base
        LRScheduler.__new__ = new  # type: ignore[assignment,method-assign]

    def close(self) -> None:
        """Note none any more."""
        LRScheduler.__new__ = _plain_new  # type: ignore[assignment,method-assign]

    def of(self, optimizers: Collection[torch.optim.Optimizer]) -> list[LRScheduler]:
        """Those of some optimizers that are still there."""
        known = {id(optimizer) for optimizer in optimizers}
        there = filter(None, (made() for made in self._made))
        return [one for one in there if id(getattr(one, "optimizer", None)) in known]

    def states(self, optimizers: Collection[torch.optim.Optimizer]) -> list[dict[str, Any]]:
        """What each of them counts and remembers."""
        return [
            {"class": type(one).__name__, "state": one.state_dict()} for one in self.of(optimizers)
        ]

    def load(self, states: States, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Let them go on where those of a checkpoint stood."""
        there = self.of(optimizers)
        mine = [type(one).__name__ for one in there]
        saved = [str(state["class"]) for state in states]
        if mine != saved:
            raise CheckpointError(
                f"the checkpoint was saved with the schedulers {_listed(saved)}, this job has "
                f"{_listed(mine)}; make the same ones in the same order, before the first batch"
            )
        for one, state in zip(there, states, strict=True):
            one.load_state_dict(_in_its_types(one, state["state"]))
        if there:
            logger.debug("schedulers go on: %s", _listed(mine))


def _plain_new(cls: type[LRScheduler], *_: Any, **__: Any) -> LRScheduler:
    return object.__new__(cls)


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
