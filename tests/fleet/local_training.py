# SPDX-License-Identifier: Apache-2.0
"""A simulation of local SGD and DiLoCo in one process, which a job must equal."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}


def network() -> nn.Sequential:
    """A network with batch norm, whose statistics are buffers."""
    torch.manual_seed(0)
    # a bias before batch norm has only rounding errors as gradient, which Adam amplifies
    layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batches(worker: int, steps: int) -> list[Batch]:
    """The batches of a worker."""
    generator = torch.Generator().manual_seed(100 + worker)
    return [
        (
            torch.randn(8, 6, generator=generator).double() + worker,
            torch.randint(0, 3, (8,), generator=generator),
        )
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def everything(model: nn.Module) -> Tensor:
    """Parameters and buffers."""
    return flat(model.state_dict().values())


@dataclasses.dataclass(frozen=True)
class Case:
    """The optimizer and the settings of one training."""

    optimizer: str = "momentum"
    k: int = 3
    begin_step: int = 2
    optimizer_state: str = "keep"
    buffers: str = "average"
    #: learning rate and momentum
    outer: tuple[float, float] | None = None
    steps: int = 9

    def settings(self) -> dict[str, Any]:
        """The settings of the strategy."""
        name = "localsgd" if self.outer is None else "diloco"
        configs: dict[str, Any] = {
            "k_steps": self.k,
            "begin_step": self.begin_step,
            "optimizer_state": self.optimizer_state,
            "buffers": self.buffers,
        }
        if self.outer is not None:
            configs |= {"outer_lr": self.outer[0], "outer_momentum": self.outer[1]}
        return {name: True, f"{name}_configs": configs}


class Simulation:
    """All workers of a case."""

    def __init__(self, case: Case, workers: int) -> None:
        self.case = case
        self.models = [network() for _ in range(workers)]
        self.optimizers = [OPTIMIZERS[case.optimizer](m.parameters()) for m in self.models]
        self.start = copy.deepcopy(self.models[0])
        self.outer: Any = None
        if case.outer is not None:
            lr, momentum = case.outer
            self.outer = torch.optim.SGD(
                self.start.parameters(), lr=lr, momentum=momentum, nesterov=bool(momentum)
            )

    def run(self) -> list[Tensor]:
        """Train; returns the final state of each worker."""
        data = [batches(worker, self.case.steps) for worker in range(len(self.models))]
        last = self.case.begin_step
        for step in range(1, self.case.steps + 1):
            together = step <= self.case.begin_step
            self._step([mine[step - 1] for mine in data], together=together)
            if not together and step - last == self.case.k:
                self._average()
                last = step
            if together:
                self.start.load_state_dict(self.models[0].state_dict())
        return [everything(model) for model in self.models]

    def _step(self, data: list[Batch], *, together: bool) -> None:
        if together:
            for model in self.models:
                _copy(self.models[0].buffers(), model.buffers())
        for model, batch in zip(self.models, data, strict=True):
            model.zero_grad()
            loss_of(model, batch).backward()
        if together:
            for each in zip(*(model.parameters() for model in self.models), strict=True):
                mean = torch.stack([p.grad for p in each if p.grad is not None]).mean(0)
                for parameter in each:
                    parameter.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def _average(self) -> None:
        means = [
            torch.stack(list(each)).mean(0)
            for each in zip(*(model.parameters() for model in self.models), strict=True)
        ]
        if self.outer is None:
            _copy(means, self.start.parameters())
        else:
            for parameter, mean in zip(self.start.parameters(), means, strict=True):
                parameter.grad = (parameter - mean).detach()
            self.outer.step()
        for model in self.models:
            _copy(self.start.parameters(), model.parameters())
        self._set_buffers()
        self._set_moments()

    def _set_buffers(self) -> None:
        for each in zip(*(model.buffers() for model in self.models), strict=True):
            value = each[0].clone()
            if self.case.buffers == "average" and value.is_floating_point():
                value = torch.stack(list(each)).mean(0)
            for buffer in each:
                buffer.copy_(value)

    def _set_moments(self) -> None:
        if self.case.optimizer_state == "reset":
            fresh = [OPTIMIZERS[self.case.optimizer](m.parameters()) for m in self.models]
            self.optimizers = fresh
        if self.case.optimizer_state == "average":
            self.average_moments()

    def average_moments(self) -> None:
        """Average the optimizer states under any policy."""
        for index in range(len(list(self.models[0].parameters()))):
            states = [
                optimizer.state[optimizer.param_groups[0]["params"][index]]
                for optimizer in self.optimizers
            ]
            for key in states[0]:
                mean = torch.stack([state[key] for state in states]).mean(0)
                for state in states:
                    state[key].copy_(mean)


@torch.no_grad()
def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
