# SPDX-License-Identifier: Apache-2.0
"""Writing graphs while operations run: proxies, modes, and nodes of `torch.fx`.

Why: make_fx and torch.export write graphs by `torch.fx.experimental.proxy_tensor`. Their public
sides trace one function from beginning to end; Fleetlight traces the calls of a script one by one.
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
    """The node before the first and after the last, even in an empty graph."""
    return graph._root


def rename(node: fx.Node, name: str) -> None:
    """Give a node this name, or a free one like it; setting `name` does not look for clashes."""
    node._rename(name)


def was_erased(node: fx.Node) -> bool:
    """True for a node that a pass has removed from its graph."""
    return bool(node._erased)
