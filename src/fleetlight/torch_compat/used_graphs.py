# SPDX-License-Identifier: Apache-2.0
"""Whether backward of a loss has been done: torch then has let go of what its graph had saved.

Why: no public name tells it. A second backward is an error only once it comes to such a node, when
it has added to some gradients already. Where torch lacks `SavedTensor.data`, the saved tensor is
unpacked instead, which calls its hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_RAW = "_raw_saved_"


def is_used(loss: Tensor) -> bool:
    """True behind a `loss.backward()` that did not retain the graph.

    Looks at the node nearest to the loss that saves tensors. Graphs that save none, such as that
    of a plain sum of parameters, tell nothing: False.
    """
    layer = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(layer)
    while layer:
        states = [state for node in layer if (state := _state(node)) is not None]
        if states:
            return any(states)
        layer = [
            node for one in layer for node, _ in one.next_functions if node and node not in seen
        ]
        layer = list(dict.fromkeys(layer))
        seen.update(layer)
    return False


def nodes_so_far() -> int:
    """How many nodes this thread's graphs have had so far."""
    count: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return count


def is_older(loss: Tensor, nodes: int) -> bool:
    """True for a loss that was computed on this thread before `nodes_so_far` answered that."""
    return loss.grad_fn is not None and loss.grad_fn._sequence_nr() < nodes


def _state(node: Any) -> bool | None:
    """True where what it saved is gone, False where it is there, None where it saves nothing."""
    try:
        if hasattr(type(node), "_raw_saved_tensors"):  # a torch.autograd.Function
            return False if node._raw_saved_tensors else None
        names = [name for name in dir(node) if name.startswith(_RAW)]
        return _state_of_saved(node, names)
    except RuntimeError:
        return True


def _state_of_saved(node: Any, names: list[str]) -> bool | None:
    """The same of a node of torch's own; raises RuntimeError where what it saved is gone."""
    for raw in names:
        found = getattr(node, raw)
        for saved in found if isinstance(found, (tuple, list)) else [found]:
            # one that has something, behind hooks or not; hooks may compute a forward again
            if any(getattr(saved, name, None) is not None for name in ("data", "unpack_hook")):
                return False
    for name in names:
        # an optional tensor that was not given answers None
        getattr(node, "_saved_" + name.removeprefix(_RAW))
    return None
