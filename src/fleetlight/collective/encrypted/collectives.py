# SPDX-License-Identifier: Apache-2.0
"""The collectives of an encrypted group, on flat tensors in main memory.

Large tensors are cut into one part for each member, which sums its part and sends the sum to all:
a member sends 2(N-1)/N of the bytes. Small ones go through the first member, and two members just
exchange what they have. Every member gets the same bits: each sum is made once, or of two values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fleetlight.collective.encrypted.mesh import Mesh

#: add the second tensor to the first, or whatever the reduction does
Combine = Callable[[Tensor, Tensor], object]
#: below this, messages cost more than bytes
SMALL_BYTES = 64 << 10


def all_reduce(mesh: Mesh, tensor: Tensor, combine: Combine) -> None:
    """Combine everybody's tensor, in place, on everybody."""
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
    """The tensor in so many parts, the last ones maybe empty."""
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
    """Combine everybody's tensor on the root; the others keep theirs."""
    if mesh.rank != root:
        mesh.send(root, tensor).wait()
        return
    arrived = torch.empty_like(tensor)
    for source in mesh.before():
        mesh.receive(source, arrived)
        combine(tensor, arrived)


def broadcast(mesh: Mesh, tensor: Tensor, root: int) -> None:
    """Give the root's tensor to everybody."""
    if mesh.rank != root:
        mesh.receive(root, tensor)
        return
    for sending in [mesh.send(to, tensor) for to in mesh.after()]:
        sending.wait()


def reduce_scatter(mesh: Mesh, mine: Tensor, parts: Sequence[Tensor], combine: Combine) -> None:
    """Combine everybody's part for this member into `mine`, which may be that very part."""
    sendings = [mesh.send(to, parts[to]) for to in mesh.after()]
    total = parts[mesh.rank].clone()
    arrived = torch.empty_like(total)
    for source in mesh.before():
        mesh.receive(source, arrived)
        combine(total, arrived)
    for sending in sendings:
        sending.wait()
    mine.copy_(total)


def all_gather(mesh: Mesh, everybody: Sequence[Tensor], mine: Tensor) -> None:
    """Everybody's tensor on everybody; `mine` may be the one of this member among them."""
    sendings = [mesh.send(to, mine) for to in mesh.after()]
    for source in mesh.before():
        mesh.receive(source, everybody[source])
    for sending in sendings:
        sending.wait()
    if everybody[mesh.rank].data_ptr() != mine.data_ptr():
        everybody[mesh.rank].copy_(mine)


def all_to_all(mesh: Mesh, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    """Each member's tensor for this one."""
    sendings = [mesh.send(to, sent[to]) for to in mesh.after()]
    for source in mesh.before():
        mesh.receive(source, received[source])
    for sending in sendings:
        sending.wait()
    received[mesh.rank].copy_(sent[mesh.rank])


def gather(mesh: Mesh, everybody: Sequence[Tensor] | None, mine: Tensor, root: int) -> None:
    """Everybody's tensor on the root."""
    if everybody is None:
        mesh.send(root, mine).wait()
        return
    for source in mesh.before():
        mesh.receive(source, everybody[source])
    everybody[root].copy_(mine)


def scatter(mesh: Mesh, mine: Tensor, parts: Sequence[Tensor] | None, root: int) -> None:
    """This member's part of what the root has."""
    if parts is None:
        mesh.receive(root, mine)
        return
    for sending in [mesh.send(to, parts[to]) for to in mesh.after()]:
        sending.wait()
    mine.copy_(parts[root])
