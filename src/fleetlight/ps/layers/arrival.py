# SPDX-License-Identifier: Apache-2.0
"""How the gradient that backward has found comes into `weight.grad` of a table.

Torch would do it, and copies do. But it calls `detach` on what it was given, and before the first
operation on a tensor of another class than its own it loads torch.distributed.tensor, most of a
second. So a lookup lays its gradient down by itself, whenever torch would do nothing else with it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from fleetlight.ps.layers.table_gradient import TableGradient
from fleetlight.ps.update import TableGradients

#: scripts may call backward in several threads
_lock = threading.Lock()


def arrived(node: Any, weight: Tensor, part: TableGradients) -> TableGradient | None:
    """Called in the backward of `node`, whose first input is `weight`: what it is to answer."""
    if not _is_only_kept(node, weight):
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


def _is_only_kept(node: Any, weight: Tensor) -> bool:
    """True when torch would add the gradient to `weight.grad` and call nobody."""
    keeper = node.next_functions[0][0]
    if getattr(keeper, "variable", None) is not weight:
        return False
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(keeper))
    except (AttributeError, RuntimeError):
        # torch.autograd.grad asks for it
        return False
