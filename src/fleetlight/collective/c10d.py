# SPDX-License-Identifier: Apache-2.0
"""Connections of torch.distributed, and the process group of all workers."""

from __future__ import annotations

import os

import torch.distributed as dist

# Defaults of its functions hold the process group there is when it is imported, and with it all
# connections. torch's compiler imports it, whenever that is; better now, while there is none.
import torch.distributed.nn.functional  # noqa: F401

from fleetlight.torch_compat.c10d import Store, keep_groups_in_child
from fleetlight.wire.descriptors import bounded_connections

#: how long the store may take to answer what it can answer at once
REPLY_S = 5.0


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


os.register_at_fork(after_in_child=keep_groups_in_child)
