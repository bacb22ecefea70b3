# SPDX-License-Identifier: Apache-2.0
"""Outer steps: how the mean movement of the workers changes their common parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fleetlight.torch_compat.optimizers import foreach_add_, foreach_mul_, foreach_sub_


class Means(Protocol):
    """Takes means over the workers by the one reducer."""

    def mean(self, named: Mapping[str, Tensor], operation: str) -> None:
        """Replace named tensors by their means over all workers.

        All workers call it with the same names, shapes and types, after the same steps. A tensor
        `moved/<parameter>` may travel coded as the gradients of that parameter do.
        """


class Member(NamedTuple):
    """A model that is averaged, and the `Means` that averages its tensors."""

    means: Means
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class OuterOptimizer(Protocol):
    """The step of an averaging. Movements are start minus end, like gradients."""

    def step(self, parameters: list[Tensor], start: list[Tensor], moved: list[Tensor]) -> None:
        """Change `start` by the mean movements `moved`; may overwrite them."""

    def state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """The state, by names of parameters."""

    def load(self, state: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]) -> None:
        """Load what `state` returned."""


class PlainMean:
    """The workers continue from the mean of their parameters (LocalSGD)."""

    def step(self, parameters: list[Tensor], start: list[Tensor], moved: list[Tensor]) -> None:
        """Move by the mean."""
        foreach_sub_(start, moved)

    def state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """No state."""
        return {}

    def load(self, state: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]) -> None:
        """Nothing to load."""


class NesterovMomentum:
    """SGD with Nesterov momentum on the mean movement as the gradient (DiLoCo)."""

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
        """Load the momenta that `state` has; others begin at zero."""
        self._buffers = {
            parameter: state[name].to(parameter.device, parameter.dtype, copy=True)
            for parameter, name in names.items()
            if name in state
        }
