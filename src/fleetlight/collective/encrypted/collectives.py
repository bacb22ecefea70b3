# SPDX-License-Identifier: Apache-2.0
"""The collectives of an encrypted group, on flat tensors in main memory.

Large tensors are split into one part for each member, which sums its part and sends the sum to all:
a member sends 2(N-1)/N of the bytes. Small tensors go through the first member, and two members
exchange theirs. All members get the same bits: each sum is made once, or of two values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fleetlight.collective.encrypted.mesh import Mesh

#: combines the second tensor into the first, such as by addition
Combine = Callable[[Tensor, Tensor], object]
#: below this size, messages cost more than bytes
SMALL_BYTES = 64 << 10


def all_reduce(mesh: Mesh, tensor: Tensor, combine: Combine) -> None:
    """Combine the tensors of all members, in place, on all members."""
    if mesh.size == 1:
        return
    if mesh.size == 2:
        _swap(mesh, tensor, combine)
    elif tensor.nbytes < SMALL_BYTES:
        reduce(mesh, tensor, combine, 0)
        broadcast(mesh, tensor, 0)
    else:
        parts = parts_of(tensor, mesh.size)
        reduce_scatter(mesh, parts[mesh.rank], parts, combine)
        all_gather(mesh, parts, parts[mesh.rank])


def parts_of(tensor: Tensor, count: int) -> list[Tensor]:
    """Split a tensor into `count` parts; the last ones may be empty."""
    parts = list(torch.split(tensor, max(1, -(-tensor.numel() // count))))
    return parts + [tensor[:0]] * (count - len(parts))


def _swap(mesh: Mesh, tensor: Tensor, combine: Combine) -> None:
    other = 1 - mesh.rank
    arrived = torch.empty_like(tensor)
    sending = mesh.send(other, tensor)
    mesh.receive(other, arrived)
    sending.wait()
    # the operands in the same order on both, so the bits are the same
    combine(tensor, arrived) if mesh.rank == 0 else tensor.copy_(
        _combined(arrived, tensor, combine)
    )


def _combined(first: Tensor, second: Tensor, combine: Combine) -> Tensor:
    combine(first, second)
    return first


def reduce(mesh: Mesh, tensor: Tensor, combine: Combine, root: int) -> None:
    """Combine the tensors of all members on the root; the others keep theirs."""
    if mesh.rank != root:
        mesh.send(root, tensor).wait()
        return
    arrived = torch.empty_like(tensor)
    for source in mesh.before():
        mesh.receive(source, arrived)
        combine(tensor, arrived)


def broadcast(mesh: Mesh, tensor: Tensor, root: int) -> None:
    """Give the root's tensor to all members."""
    if mesh.rank != root:
        mesh.receive(root, tensor)
        return
    for sending in [mesh.send(to, tensor) for to in mesh.after()]:
        sending.wait()


def reduce_scatter(mesh: Mesh, mine: Tensor, parts: Sequence[Tensor], combine: Combine) -> None:
    """Combine all members' parts for this one into `mine`, which may be one of `parts`."""
    sendings = [mesh.send(to, parts[to]) for to in mesh.after()]
    total = parts[mesh.rank].clone()
    arrived = torch.empty_like(total)
    for source in mesh.before():
        mesh.receive(source, arrived)
        combine(total, arrived)
    for sending in sendings:
        sending.wait()
    mine.copy_(total)


def all_gather(mesh: Mesh, gathered: Sequence[Tensor], mine: Tensor) -> None:
    """Gather the tensors of all members on all; `mine` may be one of `gathered`."""
    sendings = [mesh.send(to, mine) for to in mesh.after()]
    for source in mesh.before():
        mesh.receive(source, gathered[source])
    for sending in sendings:
        sending.wait()
    if gathered[mesh.rank].data_ptr() != mine.data_ptr():
        gathered[mesh.rank].copy_(mine)


def all_to_all(mesh: Mesh, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    """Receive each member's tensor for this one."""
    sendings = [mesh.send(to, sent[to]) for to in mesh.after()]
    for source in mesh.before():
        mesh.receive(source, received[source])
    for sending in sendings:
        sending.wait()
    received[mesh.rank].copy_(sent[mesh.rank])


def gather(mesh: Mesh, gathered: Sequence[Tensor] | None, mine: Tensor, root: int) -> None:
    """Gather the tensors of all members on the root."""
    if gathered is None:
        mesh.send(root, mine).wait()
        return
    for source in mesh.before():
        mesh.receive(source, gathered[source])
    gathered[root].copy_(mine)


def scatter(mesh: Mesh, mine: Tensor, parts: Sequence[Tensor] | None, root: int) -> None:
    """Receive this member's part of the root's tensors."""
    if parts is None:
        mesh.receive(root, mine)
        return
    for sending in [mesh.send(to, parts[to]) for to in mesh.after()]:
        sending.wait()
    mine.copy_(parts[root])
