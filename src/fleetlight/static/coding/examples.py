# SPDX-License-Identifier: Apache-2.0
"""Fake tensors with symbolic sizes for every node of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.static.graph.feeds import Shape
from fleetlight.torch_compat.fakes import ShapeEnv, as_python, fakes_of, open_fake

Fit = Callable[[Sequence[Tensor]], bool]


class Examples:
    """Computed again, since nodes of a rewritten or loaded graph may lack symbolic sizes.

    `inputs` are those of a run, whose sizes become the hints; `shapes` have None for each dynamic
    size. A shape of None is a tensor of fixed shape.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Tensor], shapes: Sequence[Shape | None]
    ) -> None:
        self._shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.fakes = fakes_of(self._shapes)
        #: the input and the dimension that give a symbol its value
        self._places: dict[str, tuple[int, int]] = {}
        self._inputs = inputs
        given = [self._fake(tensor, shape) for tensor, shape in zip(inputs, shapes, strict=True)]
        for number, fake in enumerate(given):
            for dim, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt):
                    self._places[str(size.node.expr)] = number, dim
        self._found: dict[fx.Node, Any] = {}
        self._compute(graph, given)

    def of(self, node: fx.Node) -> Any:
        """The fake tensor of a node."""
        return self._found[node]

    def fit(self) -> Fit:
        """A function that checks the guards of these examples on other inputs."""
        wanted = sorted({as_python(guard.expr) for guard in self._shapes.guards})
        lines = ["def fits(inputs):"]
        lines += [f"    {name} = inputs[{i}].shape[{d}]" for name, (i, d) in self._places.items()]
        lines += [f"    return {' and '.join(f'({text})' for text in wanted) or True}"]
        known: dict[str, Any] = {"math": math}
        try:
            exec("\n".join(lines), known)
            fits: Fit = known["fits"]
            if fits(self._inputs):
                return fits
        except (SyntaxError, NameError, TypeError):
            # sympy's printer does not always write Python
            pass
        places = tuple(self._places.values())
        sizes = [self._inputs[i].shape[d] for i, d in places]
        return lambda inputs: [inputs[i].shape[d] for i, d in places] == sizes

    def _compute(self, graph: fx.Graph, given: Sequence[Tensor]) -> None:
        inputs = iter(given)
        with self.fakes, torch.no_grad():
            for node in graph.nodes:
                if node.op == "placeholder":
                    self._found[node] = next(inputs)
                elif node.op == "call_function":
                    args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
                    self._found[node] = node.target(*args, **kwargs)

    def _fake(self, tensor: Tensor, shape: Shape | None) -> Tensor:
        """A fake tensor with a symbol for each dynamic size."""
        if shape is None:
            return self.fakes.from_tensor(tensor.detach(), static_shapes=True)
        fake: Tensor = open_fake(self.fakes, tensor.detach(), [size is None for size in shape])
        return fake
