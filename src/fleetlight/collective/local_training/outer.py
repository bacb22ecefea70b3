# SPDX-License-Identifier: Apache-2.0
"""What the workers' mean movement does to the parameters that they had in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fleetlight.torch_compat.optimizers import foreach_add_, foreach_mul_, foreach_sub_


class Means(Protocol):
    """Takes means over the workers, by their one reducer."""

    def mean(self, named: Mapping[str, Tensor], operation: str) -> None:
        """Put the means over all workers in the place of tensors, whose names are their own.

        All workers come here with the same names, shapes and types; those that have made other
        steps are an error. What is called `moved/<parameter>` may be coded as that parameter's
        gradients are.
        """


class Member(NamedTuple):
    """A model, and who takes the means of what it has."""

    means: Means
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class OuterOptimizer(Protocol):
    """A step of all workers together. Movements are start minus end, as gradients are."""

    def step(self, parameters: list[Tensor], start: list[Tensor], moved: list[Tensor]) -> None:
        """Change `start` by the mean movements, which may be overwritten."""

    def state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """What it remembers, by the names of the parameters."""

    def load(self, state: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]) -> None:
        """Take up what `state` answered."""


class PlainMean:
    """The workers go on from the mean of their parameters (LocalSGD)."""

    def step(self, parameters: list[Tensor], start: list[Tensor], moved: list[Tensor]) -> None:
        """Move by the mean."""
        foreach_sub_(start, moved)

    def state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """It remembers nothing."""
        return {}

    def load(self, state: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]) -> None:
        """There is nothing to take up."""


class NesterovMomentum:
    """SGD with Nesterov's momentum, for which the mean movement is the gradient (DiLoCo)."""

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self._buffers: dict[Tensor, Tensor] = {}

    def step(self, parameters: list[Tensor], start: list[Tensor], moved: list[Tensor]) -> None:
        """As torch.optim.SGD(nesterov=True) does."""
        if self._momentum:
            buffers = [self._buffer(parameter) for parameter in parameters]
            foreach_mul_(buffers, self._momentum)
            foreach_add_(buffers, moved)
            foreach_add_(moved, buffers, alpha=self._momentum)
        foreach_add_(start, moved, alpha=-self._lr)

    def _buffer(self, parameter: Tensor) -> Tensor:
        if parameter not in self._buffers:
            self._buffers[parameter] = torch.zeros_like(parameter)
        return self._buffers[parameter]

    def state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """The momenta."""
        return {name: self._buffers[p] for p, name in names.items() if p in self._buffers}

    def load(self, state: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]) -> None:
        """Take up the momenta that are known; others begin at zero."""
        self._buffers = {
            parameter: state[name].to(parameter.device, parameter.dtype, copy=True)
            for parameter, name in names.items()
            if name in state
        }
