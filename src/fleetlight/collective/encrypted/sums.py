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

from fleetlight.collective.encrypted.exchange import Peers

#: add the second tensor to the first, or whatever the reduction does
Combine = Callable[[Tensor, Tensor], object]
#: below this, messages cost more than bytes
SMALL_BYTES = 64 << 10


def all_reduce(peers: Peers, tensor: Tensor, combine: Combine) -> None:
    """Combine everybody's tensor, in place, on everybody."""
    if peers.size == 1:
        return
    if peers.size == 2:
        _swap(peers, tensor, combine)
    elif tensor.nbytes < SMALL_BYTES:
        reduce(peers, tensor, combine, 0)
        broadcast(peers, tensor, 0)
    else:
        parts = parts_of(tensor, peers.size)
        reduce_scatter(peers, parts[peers.rank], parts, combine)
        all_gather(peers, parts, parts[peers.rank])


def parts_of(tensor: Tensor, count: int) -> list[Tensor]:
    """The tensor in so many parts, the last ones maybe empty."""
    parts = list(torch.split(tensor, max(1, -(-tensor.numel() // count))))
    return parts + [tensor[:0]] * (count - len(parts))


def _swap(peers: Peers, tensor: Tensor, combine: Combine) -> None:
    other = 1 - peers.rank
    arrived = torch.empty_like(tensor)
    sending = peers.send(other, tensor)
    peers.receive(other, arrived)
    sending.wait()
    # the operands in the same order on both, so the bits are the same
    combine(tensor, arrived) if peers.rank == 0 else tensor.copy_(
        _combined(arrived, tensor, combine)
    )


def _combined(first: Tensor, second: Tensor, combine: Combine) -> Tensor:
    combine(first, second)
    return first


def reduce(peers: Peers, tensor: Tensor, combine: Combine, root: int) -> None:
    """Combine everybody's tensor on the root; the others keep theirs."""
    if peers.rank != root:
        peers.send(root, tensor).wait()
        return
    arrived = torch.empty_like(tensor)
    for source in peers.before():
        peers.receive(source, arrived)
        combine(tensor, arrived)


def broadcast(peers: Peers, tensor: Tensor, root: int) -> None:
    """Give the root's tensor to everybody."""
    if peers.rank != root:
        peers.receive(root, tensor)
        return
    for sending in [peers.send(to, tensor) for to in peers.after()]:
        sending.wait()


def reduce_scatter(peers: Peers, mine: Tensor, parts: Sequence[Tensor], combine: Combine) -> None:
    """Combine everybody's part for this member into `mine`, which may be that very part."""
    sendings = [peers.send(to, parts[to]) for to in peers.after()]
    total = parts[peers.rank].clone()
    arrived = torch.empty_like(total)
    for source in peers.before():
        peers.receive(source, arrived)
        combine(total, arrived)
    for sending in sendings:
        sending.wait()
    mine.copy_(total)


def all_gather(peers: Peers, everybody: Sequence[Tensor], mine: Tensor) -> None:
    """Everybody's tensor on everybody; `mine` may be the one of this member among them."""
    sendings = [peers.send(to, mine) for to in peers.after()]
    for source in peers.before():
        peers.receive(source, everybody[source])
    for sending in sendings:
        sending.wait()
    if everybody[peers.rank].data_ptr() != mine.data_ptr():
        everybody[peers.rank].copy_(mine)


def all_to_all(peers: Peers, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    """Each member's tensor for this one."""
    sendings = [peers.send(to, sent[to]) for to in peers.after()]
    for source in peers.before():
        peers.receive(source, received[source])
    for sending in sendings:
        sending.wait()
    received[peers.rank].copy_(sent[peers.rank])


def gather(peers: Peers, everybody: Sequence[Tensor] | None, mine: Tensor, root: int) -> None:
    """Everybody's tensor on the root."""
    if everybody is None:
        peers.send(root, mine).wait()
        return
    for source in peers.before():
        peers.receive(source, everybody[source])
    everybody[root].copy_(mine)


def scatter(peers: Peers, mine: Tensor, parts: Sequence[Tensor] | None, root: int) -> None:
    """This member's part of what the root has."""
    if parts is None:
        peers.receive(root, mine)
        return
    for sending in [peers.send(to, parts[to]) for to in peers.after()]:
        sending.wait()
    mine.copy_(parts[root])
