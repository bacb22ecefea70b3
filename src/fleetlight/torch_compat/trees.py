# SPDX-License-Identifier: Apache-2.0
"""Nested lists, tuples and dicts as flat lists: `torch.utils._pytree`.

Why: torch's own containers of outputs (such as those of transformers) are registered there, and
nowhere else. The public `torch.utils.pytree` does not take these registrations in every version.
"""

from torch.utils._pytree import (
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = ["tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_unflatten"]
