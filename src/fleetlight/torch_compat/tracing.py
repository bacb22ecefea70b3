# SPDX-License-Identifier: Apache-2.0
"""How a graph is written while operations are called: proxies, modes, and nodes of `torch.fx`.

Why: `torch.fx.experimental.proxy_tensor` is what make_fx and torch.export write with. Their public
sides trace one function from beginning to end; a script of Fleetlight writes one call after
another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

__all__ = [
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
    "TorchDispatchMode",
    "get_proxy_slot",
    "no_dispatch",
    "rename",
    "return_and_correct_aliasing",
    "root",
    "track_tensor_tree",
    "was_erased",
    "without_mkldnn",
]


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Inside the block torch does not compute by oneDNN.

    `torch.backends.mkldnn.flags` would do it, but also warns and sets other things.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def root(graph: fx.Graph) -> fx.Node:
    """The node before the first and behind the last; `graph.nodes` gives no empty place."""
    return graph._root


def rename(node: fx.Node, name: str) -> None:
    """Give a node this name, or one like it that is free; setting `name` looks for no clash."""
    node._rename(name)


def was_erased(node: fx.Node) -> bool:
    """True for a node that a pass has taken out of its graph."""
    return bool(node._erased)
