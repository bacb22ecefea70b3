# SPDX-License-Identifier: Apache-2.0
"""The names of torch.distributed that its Python package holds but does not declare."""

from __future__ import annotations

import ctypes
import os

import torch.distributed as dist

# Defaults of its functions hold the process group there is when it is imported, and with it all
# connections. torch's compiler imports it, whenever that is; better now, while there is none.
import torch.distributed.nn.functional  # noqa: F401
from torch._C._distributed_c10d import (
    GradBucket,
    Logger,
    PrefixStore,
    Reducer,
    Store,
    TCPStore,
    _broadcast_coalesced,
    _register_comm_hook,
)

from fleetlight.sockets.descriptors import bounded_connections

#: how long the store may take to answer what it can answer at once
REPLY_S = 5.0

__all__ = [
    "REPLY_S",
    "GradBucket",
    "Logger",
    "PrefixStore",
    "Reducer",
    "Store",
    "TCPStore",
    "_broadcast_coalesced",
    "_register_comm_hook",
    "cloned",
    "world",
]


def world() -> dist.ProcessGroup:
    """The process group of all workers."""
    group = dist.group.WORLD
    assert group is not None, "the process group is formed before anything is sent"
    return group


def cloned(store: Store) -> Store:
    """A second connection to the same store, for another thread."""
    with bounded_connections(REPLY_S):
        copy: Store = store.clone()  # type: ignore[attr-defined]
    return copy


def _keep_groups_in_child() -> None:
    """The end of a forked child would wait for ever for threads of these that it does not have."""
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups_in_child)
