# SPDX-License-Identifier: Apache-2.0
"""`LocalTrainingEngine`: local training of one optimizer, and the averagings of its schedule.

When workers average, the outer step moves the last common values by the mean movement of the
workers. The result is the next common values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleetlight.collective.group import Group
from fleetlight.collective.local_training import optimizer_state as moments
from fleetlight.collective.local_training.outer import Member, OuterOptimizer
from fleetlight.collective.local_training.schedule import AdaptiveInterval, FixedInterval
from fleetlight.collective.reduction.reduce_now import MOVED
from fleetlight.torch_compat.optimizers import foreach_copy_, foreach_sub

_OPERATION = "averaging the parameters of workers that trained alone"


class LocalTrainingEngine:
    """One for each optimizer; its models come with each call."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Group,
        *,
        schedule: FixedInterval,
        outer: OuterOptimizer,
        optimizer_state: str = "keep",
        buffers: str = "average",
    ) -> None:
        """`optimizer_state`: keep, average or reset. `buffers`: average or rank0."""
        self._optimizer, self._group = optimizer, group
        self.schedule = schedule
        self._outer = outer
        self._optimizer_state, self._buffers = optimizer_state, buffers
        self._trained: list[Tensor] = []
        #: the last common values of all workers
        self._start: dict[Tensor, Tensor] = {}
        #: parameters that were added between averagings, with values that may differ
        self._unagreed: set[Tensor] = set()
        self._is_started = False
        #: True when the optimizer states of the workers may differ
        self._state_differs = False
        #: True where other code holds references to the tensors of the optimizer's state
        self.in_place = False
        #: the number of averagings so far
        self.averagings = 0

    @property
    def next_is_local(self) -> bool:
        """True when the next step is local."""
        return self.schedule.next_is_local

    @property
    def wants_first_loss(self) -> bool:
        """True until there is a first loss to compare later ones with."""
        return isinstance(self.schedule, AdaptiveInterval) and self.schedule.wants_first

    @property
    def averages_next(self) -> bool:
        """True when a collective operation follows the next step."""
        return self.schedule.averages_next or self.wants_first_loss

    @property
    def wants_loss(self) -> bool:
        """True when `step_made` needs the loss of the next step."""
        return isinstance(self.schedule, AdaptiveInterval) and self.averages_next

    def trains(self, parameters: Iterable[Tensor], *, agreed: bool = True) -> None:
        """Set the parameters that the optimizer steps.

        `agreed`: new parameters have the same values on all workers.
        """
        known, self._trained = set(self._trained), [p for p in parameters if p.numel()]
        if not agreed:
            self._unagreed.update(set(self._trained) - known)
        self._is_started = False

    @torch.no_grad()
    def before_step(self) -> None:
        """Called before each step; records the common values before the first local step."""
        if self._is_started or not self.next_is_local:
            return
        self._is_started = True
        for parameter in self._trained:
            if parameter not in self._start:
                self._start[parameter] = parameter.detach().clone()

    def step_made(self, members: Sequence[Member], loss: Tensor | None = None) -> bool:
        """Called after each step; returns True after an averaging.

        `members` are needed where `averages_next` was true before the step, `loss` where
        `wants_loss` was.
        """
        self._state_differs |= self.next_is_local
        averages = self.schedule.step_made()
        if isinstance(self.schedule, AdaptiveInterval) and self.wants_first_loss:
            self.schedule.first(self._mean_loss(members, loss), self._rate())
        if averages:
            self._average_all(members, loss)
        return averages

    def average_early(self, members: Sequence[Member]) -> bool:
        """Average now where the workers differ; the next window of k steps begins here.

        Returns True after an averaging.
        """
        if not self.schedule.differs:
            return False
        self._average_all(members, None)
        return True

    def settle(self, members: Sequence[Member]) -> None:
        """Average the optimizer states as well, whatever `optimizer_state` says."""
        if self._state_differs and members:
            moments.average(self._optimizer, members[0].means, self._group)
        self._state_differs = False

    @torch.no_grad()
    def _average_all(self, members: Sequence[Member], loss: Tensor | None) -> None:
        for member in members:
            self._average(member)
        if isinstance(self.schedule, AdaptiveInterval) and loss is not None:
            self.schedule.adapt(self._mean_loss(members, loss), self._rate())
        self._treat_optimizer_state(members)
        self.schedule.averaged()
        self.averagings += 1
        self._start = {p: self._start[p] for p in self._trained if p in self._start}
        self._unagreed.clear()

    def _average(self, member: Member) -> None:
        trained = {name: p for name, p in member.parameters.items() if p in self._start}
        parameters = list(trained.values())
        start = [self._start[p] for p in parameters]
        moved = list(foreach_sub(start, parameters)) if parameters else []
        # each worker moved from its own values; all continue from those of worker 0
        unagreed = [self._start[p] for p in parameters if p in self._unagreed]
        self._share(unagreed, "first values of new parameters")
        averaged, taken = self._sorted(member.buffers)
        named = dict(zip([MOVED + name for name in trained], moved, strict=True))
        member.means.mean({**named, **averaged}, _OPERATION)
        if parameters:
            self._outer.step(parameters, start, moved)
            foreach_copy_(parameters, start)
        self._share(taken, "buffers of worker 0")

    def _sorted(self, buffers: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The buffers to average, and those to take from worker 0."""
        averaged = {
            f"buffer/{name}": buffer
            for name, buffer in buffers.items()
            if self._buffers == "average" and buffer.is_floating_point() and buffer.numel()
        }
        others = [b for name, b in buffers.items() if f"buffer/{name}" not in averaged]
        return averaged, others

    def _share(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Give worker 0's tensors to all workers."""
        for _, same_device in itertools.groupby(sorted(tensors, key=_kind), _kind):
            self._group.broadcast(list(same_device), operation)

    def _treat_optimizer_state(self, members: Sequence[Member]) -> None:
        if self._optimizer_state == "average":
            self.settle(members)
        elif self._optimizer_state == "reset":
            moments.reset(self._optimizer, in_place=self.in_place)
            self._state_differs = False

    def _mean_loss(self, members: Sequence[Member], loss: Tensor | None) -> float:
        """The mean loss over the workers; NaN while a worker has none."""
        seen = float("nan") if loss is None else float(loss)
        mean = torch.tensor([seen], dtype=torch.float64, device=self._group.device)
        for member in members[:1]:
            member.means.mean({"loss": mean}, "averaging the loss")
        return float(mean)

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    # -- checkpoints

    def state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """The state from which another job continues; taken while the workers are equal."""
        return {"schedule": self.schedule.state(), "outer": self._outer.state(names)}

    def load(self, state: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
        """Continue from a state, with values that are the same on all workers."""
        self.schedule.load(state["schedule"])
        self._outer.load(state["outer"], names)
        self._restart()

    def restart_at(self, step: int, names: Mapping[nn.Parameter, str]) -> None:
        """Continue after a step that was made without averaging."""
        self.schedule.restart_at(step)
        self._outer.load({}, names)
        self._restart()

    def _restart(self) -> None:
        self._start.clear()
        self._unagreed.clear()
        self._is_started = self._state_differs = False


def _kind(tensor: Tensor) -> str:
    return tensor.device.type
