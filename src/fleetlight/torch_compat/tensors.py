# SPDX-License-Identifier: Apache-2.0
"""Tensors, nested containers of tensors, and nodes of autograd.

Why: torch knows these facts and exposes them by private names only. Containers of
outputs (such as those of transformers) are registered in `torch.utils._pytree` alone; the public
`torch.utils.pytree` does not take these registrations in every version.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import (
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "assign",
    "current_derivative",
    "current_sequence_number",
    "distinct_elements",
    "has_gradient_hooks",
    "has_saved_tensor_hooks",
    "is_swappable",
    "runs_in_backward",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "version",
    "without_functions",
    "wrapper",
]

_T = TypeVar("_T", bound=Tensor)


def wrapper(kind: type[_T], size: Any, **about: Any) -> _T:
    """A tensor of a class of ours with a shape and no memory.

    Why: `__torch_dispatch__` classes are documented to be made by this private constructor.
    """
    made: _T = torch.Tensor._make_wrapper_subclass(kind, size, **about)
    return made


def without_functions() -> AbstractContextManager[None]:
    """Inside the block `__torch_function__` of tensor classes is not called."""
    return torch._C.DisableTorchFunctionSubclass()


def is_swappable(func: Any) -> bool:
    """True for the function by which `Module.to` asks whether a parameter can take new values."""
    return func is torch._has_compatible_shallow_copy_type


def version(tensor: Tensor) -> int:
    """The number of writes to a tensor, by which unchanged tensors are found.

    A copy to compare with would do the same at the cost of memory.
    """
    return tensor._version


def has_gradient_hooks(leaf: Tensor) -> bool:
    """True when a leaf has gradient hooks; no public name lists them."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def runs_in_backward(node: Any) -> bool:
    """True when the current backward will run a node; False for torch.autograd.grad.

    Where torch cannot say, the answer is False, and the caller takes the slower way.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except (AttributeError, RuntimeError):
        return False


def current_sequence_number() -> int:
    """The sequence number of the last operation, which its derivative shares."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def current_derivative() -> int | None:
    """The sequence number of the operation whose derivative runs now."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def has_saved_tensor_hooks() -> bool:
    """True inside torch.utils.checkpoint, which computes a forward again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def distinct_elements(tensor: Tensor) -> Tensor:
    """A view that has each element of an expanded tensor once.

    Why: torch refuses to write into a tensor whose elements share memory, and no public name gives
    the part that can be written to.
    """
    if tensor.is_contiguous():
        return tensor
    return tensor[_once(tensor)]


def assign(tensor: Tensor, values: Tensor) -> None:
    """Write values of the same shape; those that share memory must be equal."""
    once = _once(tensor)
    tensor[once].copy_(values[once])


def _once(tensor: Tensor) -> tuple[slice, ...]:
    return tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
