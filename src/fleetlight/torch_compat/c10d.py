# SPDX-License-Identifier: Apache-2.0
"""torch.distributed: the reducer under DistributedDataParallel, stores, and gathering.

Why: DistributedDataParallel hands its buckets only to hooks that return a future of its own kind,
and wraps the module. Fleetlight keeps the user's module, so it drives the C++ reducer itself. The
public way is DistributedDataParallel with a comm hook.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# `Store`, `PrefixStore` and `TCPStore` are public, but torch.distributed does not declare them.
from torch._C._distributed_c10d import GradBucket, Logger, PrefixStore, Reducer, Store, TCPStore
from torch._C._distributed_c10d import _broadcast_coalesced as broadcast_coalesced
from torch._C._distributed_c10d import _register_comm_hook as register_comm_hook

__all__ = [
    "GradBucket",
    "Logger",
    "PrefixStore",
    "Reducer",
    "Store",
    "TCPStore",
    "all_gather_single",
    "broadcast_coalesced",
    "check_finalized",
    "default_store",
    "empty_rendezvous_state",
    "keep_groups_in_child",
    "queue_callback",
    "rebuild_buckets",
    "reduce_scatter_single",
    "register_comm_hook",
    "rendezvous_node",
]


def all_gather_single(out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to gather one tensor of each process; `all_gather_into_tensor` before 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, mine, group=group, async_op=True)


def reduce_scatter_single(out: Tensor, values: Tensor, group: dist.ProcessGroup) -> None:
    """Sum tensors and keep one part; `reduce_scatter_tensor` before 2.13."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, values, group=group)


def rebuild_buckets(reducer: Reducer) -> bool:
    """Order buckets as the first backward filled them; returns True after a change."""
    return bool(reducer._rebuild_buckets())


def check_finalized(reducer: Reducer) -> None:
    """Raise RuntimeError when the last backward left a bucket unfilled."""
    reducer._check_reducer_finalized()


def queue_callback(callback: Any) -> None:
    """Call this at the end of the current backward, which raises what the callback raises.

    No public hook runs at the end of a backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def default_store() -> Store:
    """The store of a process group that the script opened itself; no public name returns it."""
    return dist.distributed_c10d._get_default_store()


def keep_groups_in_child() -> None:
    """Leak the process groups in a forked child.

    To free them would wait forever for threads that the child does not have.
    """
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def rendezvous_node(dynamic: Any, addr: str, pid: int, local_id: int) -> Any:
    """The description of one launcher in torch's elastic rendezvous.

    Why: torch reads and writes the state of a rendezvous as a pickle. Fleetlight stores JSON, so it
    makes the objects of the state itself; there is no public way. `dynamic` is the module
    `torch.distributed.elastic.rendezvous.dynamic_rendezvous`.
    """
    return dynamic._NodeDesc(addr, pid, local_id)


def empty_rendezvous_state(dynamic: Any) -> Any:
    """The state of a rendezvous without any launcher."""
    return dynamic._RendezvousState()
