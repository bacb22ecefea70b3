# SPDX-License-Identifier: Apache-2.0
"""`LocalTrainingEngine`: local training of one optimizer, and the averagings of its schedule.

When workers average, the outer step moves the last common values by the mean movement of the
workers. The result is the next common values.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from fleetlight.collective.group import Group
from fleetlight.collective.local_training.outer import Means, Member, OuterOptimizer
from fleetlight.collective.local_training.schedule import AdaptiveInterval, FixedInterval
from fleetlight.collective.reduction.reduce_now import MOVED
from fleetlight.errors import DivergedError
from fleetlight.torch_compat.optimizers import foreach_copy_, foreach_sub

_STATE_OPERATION = "averaging optimizer state"


class _Entry(NamedTuple):
    """The place, type and shape of a tensor of the state, equal on all workers."""

    group: int
    parameter: int
    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        return f"state/{self.key}/{self.group}.{self.parameter}"

    @property
    def counts(self) -> bool:
        """True for single numbers and integers, such as the number of steps."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return not self.shape or not (dtype.is_floating_point or dtype.is_complex)


@torch.no_grad()
def average_state(optimizer: torch.optim.Optimizer, means: Means, group: Group) -> None:
    """Give all workers the mean of their states; all workers call it.

    Step counters become the largest of all. A worker without state for a parameter that got no
    gradient contributes zeros. State that is not a tensor stays each worker's own.
    """
    entries = _common(_entries(optimizer), group)
    tensors = {entry: _tensor(optimizer, entry) for entry in entries}
    _take_largest([tensor for entry, tensor in tensors.items() if entry.counts], group)
    named = {entry.name: tensor for entry, tensor in tensors.items() if not entry.counts}
    if named:
        means.mean(named, _STATE_OPERATION)


def reset_state(optimizer: torch.optim.Optimizer, *, in_place: bool = False) -> None:
    """Reset the state. `in_place`: other code holds references to its tensors."""
    if in_place or isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _restart(optimizer.state.get(parameter, {}), group)
    else:
        optimizer.state.clear()


def _restart(state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Write the first values of torch's optimizers: zero, with these exceptions."""
    first = {
        "sum": group.get("initial_accumulator_value", 0.0),
        "step_size": group["lr"],
        "eta": group["lr"],
        "mu": 1.0,
        "mu_product": 1.0,
    }
    for key, value in state.items():
        if isinstance(value, Tensor):
            value.fill_(float(first.get(key, 0.0)))


def _parameter(optimizer: torch.optim.Optimizer, entry: _Entry) -> Tensor:
    parameter: Tensor = optimizer.param_groups[entry.group]["params"][entry.parameter]
    return parameter


def _entries(optimizer: torch.optim.Optimizer) -> list[_Entry]:
    return [
        _Entry(number, index, key, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and value.numel()
    ]


def _common(mine: list[_Entry], group: Group) -> list[_Entry]:
    """The entries of any worker, in one order on all."""
    data = msgspec.json.encode(mine)
    digests = group.gather_bytes(hashlib.sha256(data).digest(), _STATE_OPERATION)
    if len(set(digests)) == 1:
        return mine
    gathered = group.gather_bytes(data, _STATE_OPERATION)
    kinds = {entry for one in gathered for entry in msgspec.json.decode(one, type=list[_Entry])}
    _check_kinds(kinds)
    return sorted(kinds)


def _check_kinds(entries: Iterable[_Entry]) -> None:
    seen: dict[str, _Entry] = {}
    for entry in sorted(entries):
        other = seen.setdefault(entry.name, entry)
        if other != entry:
            raise DivergedError(
                f"the optimizers of the workers keep different state: {entry.key} of parameter "
                f"{entry.parameter} in group {entry.group} is {entry.dtype}{list(entry.shape)} on "
                f"one worker and {other.dtype}{list(other.shape)} on another; make the same "
                "optimizer on all workers"
            )


def _tensor(optimizer: torch.optim.Optimizer, entry: _Entry) -> Tensor:
    """The tensor of an entry; zeros where only another worker has one."""
    parameter = _parameter(optimizer, entry)
    state = optimizer.state[parameter]
    if entry.key not in state:
        group = optimizer.param_groups[entry.group]
        on_device = entry.shape or group.get("capturable") or group.get("fused")
        device = parameter.device if on_device else torch.device("cpu")
        dtype = getattr(torch, entry.dtype)
        state[entry.key] = torch.zeros(entry.shape, dtype=dtype, device=device)
    tensor: Tensor = state[entry.key]
    return tensor


def _take_largest(counters: list[Tensor], group: Group) -> None:
    """Take the maximum of each counter over the workers, in one message."""
    if not counters:
        return
    flat = torch.cat([counter.detach().reshape(-1).double().cpu() for counter in counters])
    group.all_reduce(flat, "max")
    for counter, part in zip(
        counters, torch.split(flat, [c.numel() for c in counters]), strict=True
    ):
        counter.copy_(part.view_as(counter))


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
            average_state(self._optimizer, members[0].means, self._group)
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
            reset_state(self._optimizer, in_place=self.in_place)
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
