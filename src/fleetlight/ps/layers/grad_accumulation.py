# SPDX-License-Identifier: Apache-2.0
"""How the gradient that backward has found comes into `weight.grad` of a table.

Torch would call `detach` on it first. And the first operation on any tensor of another class makes
torch load torch.distributed.tensor, most of a second. So a lookup lays its gradient down by itself,
whenever torch would do nothing but add it to what is there.
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


def arrived(
    node: Any, weight: Tensor, incoming: Tensor, part: TableGradients
) -> TableGradient | None:
    """What the backward of `node`, whose first input is `weight`, is to answer for that.

    `incoming` is the gradient that `part` was made of.
    """
    with without_functions():
        if incoming.requires_grad or not _would_only_add(node, weight):
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


def _would_only_add(node: Any, weight: Tensor) -> bool:
    """True when torch would add the gradient to `weight.grad`, and no hook of the weight sees it.

    Hooks of the lookup's own node are not known here: they see that nothing is passed on.
    """
    if not weight.requires_grad or has_gradient_hooks(weight):
        return False
    keeper = node.next_functions[0][0]
    if getattr(keeper, "variable", None) is not weight:
        return False
    return runs_in_backward(keeper)
