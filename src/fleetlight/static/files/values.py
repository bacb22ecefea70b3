# SPDX-License-Identifier: Apache-2.0
"""Shapes, types and strides of a graph's values, inferred with fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.errors import CheckpointError
from fleetlight.static.graph.feeds import Feed
from fleetlight.torch_compat.fakes import FakeTensorMode, ShapeEnv, check, fakes_of, open_fake


def fill_in(
    graph: fx.Graph, state: Sequence[Tensor], feeds: Sequence[Feed], examples: Sequence[Tensor]
) -> None:
    """Write the fake tensors into the nodes, where passes read them."""
    fakes = fakes_of(ShapeEnv(specialize_zero_one=False, duck_shape=False))
    inputs: list[Tensor] = [
        fakes.from_tensor(tensor.detach(), static_shapes=True) for tensor in state
    ]
    inputs += [_open(fakes, *pair) for pair in zip(feeds, examples, strict=True)]
    _tie(feeds, inputs[len(state) :])
    coming = iter(inputs)
    values: dict[fx.Node, Any] = {}
    with fakes, torch.no_grad():
        for number, node in enumerate(graph.nodes):
            value = next(coming) if node.op == "placeholder" else _made(node, number, values)
            values[node] = node.meta["val"] = value


def _open(fakes: FakeTensorMode, feed: Feed, example: Tensor) -> Tensor:
    """A fake feed with symbolic sizes."""
    fake: Tensor = open_fake(fakes, example, [size is None for size in feed.shape])
    return fake


def _tie(feeds: Sequence[Feed], values: Sequence[Tensor]) -> None:
    """Make sizes that must be equal one symbol."""
    seen: dict[str, Any] = {}
    for feed, value in zip(feeds, values, strict=True):
        for tie, size in zip(feed.ties, value.shape, strict=False):
            if tie is not None:
                check(seen.setdefault(tie, size) == size)


def _made(node: fx.Node, number: int, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    try:
        return target(*args, **kwargs)
    except Exception as error:  # torch raises many kinds here
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{node.name}, value {number} of the program, cannot be computed by torch "
            f"{torch.__version__}: {first or repr(error)}"
        ) from error
