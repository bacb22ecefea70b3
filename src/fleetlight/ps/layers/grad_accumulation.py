# SPDX-License-Identifier: Apache-2.0
"""Accumulates the gradient of a lookup into `weight.grad` of a table.

Torch would call `detach` on it first, and the first operation on any tensor subclass makes torch
load torch.distributed.tensor, most of a second. So a lookup accumulates its gradient itself
whenever torch would only add it.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from fleetlight.ps.layers.table_gradient import TableGradient
from fleetlight.ps.update import TableGradients
from fleetlight.torch_compat.tensors import has_gradient_hooks, runs_in_backward, without_functions

#: scripts may call backward in several threads
_lock = threading.Lock()


def accumulated(
    node: Any, weight: Tensor, incoming: Tensor, part: TableGradients, place: int = 0
) -> TableGradient | None:
    """Return the gradient of `weight` for the backward of `node`; None if it is accumulated here.

    `weight` is the tensor number `place` of the inputs of `node`; `incoming` is the gradient that
    `part` was computed from.
    """
    with without_functions():
        if incoming.requires_grad or not _would_only_add(node, weight, place):
            return TableGradient(weight, [part])
        with _lock:
            there = weight.grad
            if there is None:
                weight.grad = TableGradient(weight, [part])
            elif isinstance(there, TableGradient):
                there.parts.append(part)
            else:
                return TableGradient(weight, [part])
        return None


def _would_only_add(node: Any, weight: Tensor, place: int) -> bool:
    """True when torch would only add the gradient to `weight.grad`, without calling a hook.

    Hooks on the lookup's own node are not checked: they receive no gradient.
    """
    if not weight.requires_grad or has_gradient_hooks(weight):
        return False
    keeper = node.next_functions[place][0]
    if getattr(keeper, "variable", None) is not weight:
        return False
    return runs_in_backward(keeper)
