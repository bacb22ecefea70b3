# SPDX-License-Identifier: Apache-2.0
"""`UnservedTensors`: buffers and frozen parameters of registered models, which no server stores."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from fleetlight.torch_compat.modules import buffers, children, parameters


class UnservedTensors:
    """Finds them at every step; walks through the models only after something in them changed."""

    def __init__(self) -> None:
        #: the modules of the last walk, and their parameters, buffers and children
        self._modules: list[nn.Module] = []
        self._inside: list[object] = []
        self._own: list[tuple[str, Tensor]] = []

    def tensors(self, models: Sequence[nn.Module], served: Sequence[Tensor]) -> dict[str, Tensor]:
        """By number of the model and name in it; `served` are the tensors on servers."""
        inside = [*models, *served, *self._look()]
        is_same = len(inside) == len(self._inside)
        if not is_same or not all(map(operator.is_, inside, self._inside)):
            self._walk(models, {id(tensor) for tensor in served})
            self._inside = [*models, *served, *self._look()]
        # the weight of a layer with a table has no elements
        return {name: tensor.detach() for name, tensor in self._own if tensor.numel()}

    def _walk(self, models: Sequence[nn.Module], served: set[int]) -> None:
        self._modules = [module for model in models for module in model.modules()]
        self._own = [
            (f"{number}.{name}", tensor)
            for number, model in enumerate(models)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if id(tensor) not in served
        ]

    def _look(self) -> Iterator[object]:
        for module in self._modules:
            yield from parameters(module).values()
            yield from buffers(module).values()
            yield from children(module).values()
