# SPDX-License-Identifier: Apache-2.0
"""Runs a function once on tensors without values, and keeps what it did as a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fleetlight.errors import PlanError
from fleetlight.static.feeds import Feed

_library: Any = torch.library.Library("fleetlight", "DEF")  # type: ignore[no-untyped-call]
_library.define("gradient(Tensor(a) gradient, str name) -> Tensor(a)")


def _same(gradient: Tensor, name: str) -> Tensor:
    return gradient.view_as(gradient)


_library.impl("gradient", _same, "CompositeExplicitAutograd")
#: stands where the gradient of a parameter enters the optimizer; passes look for it
GRADIENT = torch.ops.fleetlight.gradient.default


def trace(
    function: Callable[..., Any], state: Sequence[Tensor], feeds: Sequence[tuple[Feed, Tensor]]
) -> tuple[GraphModule, list[Feed]]:
    """The graph of `function(*state, *feeds)`, and the feeds as it takes them.

    A size that the function looks at becomes a constant: the feed then has it instead of None.
    """
    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in state]
    fed = [mode.from_tensor(value, symbolic_context=_sizes(feed)) for feed, value in feeds]
    try:
        with mode:
            graph = make_fx(function, tracing_mode="real")(*fakes, *fed)
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode as error:
        raise PlanError(_depends(error)) from None
    except torch._subclasses.fake_tensor.DataDependentOutputException as error:
        raise PlanError(_depends(error)) from None
    taken = [_taken(feed, tensor, shapes) for (feed, _), tensor in zip(feeds, fed, strict=True)]
    return graph, taken


def _sizes(feed: Feed) -> StatelessSymbolicContext[Any, Any]:
    kinds = [DimDynamic.DYNAMIC if size is None else DimDynamic.STATIC for size in feed.shape]
    return StatelessSymbolicContext(dynamic_sizes=kinds)


def _taken(feed: Feed, tensor: Tensor, shapes: ShapeEnv) -> Feed:
    sizes, ties = [], []
    for size in tensor.shape:
        expression = size.node.expr if isinstance(size, torch.SymInt) else size
        found = shapes.replace(expression) if isinstance(size, torch.SymInt) else size
        constant = int(found) if not getattr(found, "free_symbols", None) else None
        sizes.append(constant)
        ties.append(None if constant is not None else str(found))
    return Feed(feed.name, tuple(sizes), feed.dtype, tuple(ties))


def _depends(error: Exception) -> str:
    return (
        "the model looks at the values of its tensors (an `if`, a loop, .item() or print): a "
        f"program has one course for all batches; use torch.where, or train eagerly ({error})"
    )
