# SPDX-License-Identifier: Apache-2.0
"""Tensors without values for every node of a graph, whose sizes know which of them are open."""

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
    """Made anew, since what nodes of a rewritten or loaded graph say of themselves may be less.

    `inputs` are those of a run, so that their sizes are the likely ones; `shapes` say of each which
    sizes are None, open. None is a tensor that always has the same.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Tensor], shapes: Sequence[Shape | None]
    ) -> None:
        self._shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.fakes = fakes_of(self._shapes)
        #: where a run finds the value of a symbol: which input, which dimension
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
        """The example of a node."""
        return self._found[node]

    def fit(self) -> Fit:
        """Whether other inputs are as has been taken for granted since the examples were made."""
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
            # what the printer writes is not always Python
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
        """Of what is open, a symbol."""
        if shape is None:
            return self.fakes.from_tensor(tensor.detach(), static_shapes=True)
        fake: Tensor = open_fake(self.fakes, tensor.detach(), [size is None for size in shape])
        return fake
