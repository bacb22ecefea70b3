# SPDX-License-Identifier: Apache-2.0
"""`EncryptedGroup` computes what torch's groups compute, for any size and number of members."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.collective.encrypted.members import LIMIT_S, each, linked
from torch import Tensor

from fleetlight.collective.encrypted.collectives import SMALL_BYTES
from fleetlight.collective.encrypted.links import LinkError
from fleetlight.collective.encrypted.process_group import EncryptedGroup

SIZES = [1, 5, SMALL_BYTES // 4 + 3]


@contextlib.contextmanager
def groups(folder: Path, count: int, limit_s: float = LIMIT_S) -> Iterator[list[EncryptedGroup]]:
    with linked(folder, count) as links:
        members = [EncryptedGroup(link, "0", link.index, range(count), limit_s) for link in links]
        try:
            yield members
        finally:
            for group in members:
                group.shutdown()


def on_all(folder: Path, count: int, act: Callable[[EncryptedGroup, int], Any]) -> list[Any]:
    """Returns the result of `act` on each member."""
    with groups(folder, count) as members:
        return each([lambda g=g, i=i: act(g, i) for i, g in enumerate(members)])  # type: ignore[misc]


def values(index: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(index)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sums_are_correct_and_bit_identical(certificates: Path, count: int, size: int) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        tensor = values(index, size)
        group.allreduce([tensor]).wait()
        return tensor

    sums = on_all(certificates, count, act)
    expected = torch.stack([values(i, size).double() for i in range(count)]).sum(0)
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize(
    ("op", "of"),
    [
        (dist.ReduceOp.MAX, lambda t: t.max(0).values),
        (dist.ReduceOp.MIN, lambda t: t.min(0).values),
        (dist.ReduceOp.AVG, lambda t: t.mean(0)),
        (dist.ReduceOp.PRODUCT, lambda t: t.prod(0)),
    ],
)
@pytest.mark.parametrize("count", [2, 3])
def test_other_reductions_are_correct(
    certificates: Path, count: int, op: Any, of: Callable[[Tensor], Tensor]
) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensor = values(index, 7)
        group.allreduce([tensor], options).wait()
        return tensor

    expected = of(torch.stack([values(i, 7) for i in range(count)]))
    for one in on_all(certificates, count, act):
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_all_types_are_summed(certificates: Path, dtype: torch.dtype) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        tensor = torch.full((3, 2), index + 1, dtype=dtype)
        group.allreduce([tensor]).wait()
        return tensor

    for one in on_all(certificates, 3, act):
        assert torch.equal(one, torch.full((3, 2), 6, dtype=dtype))


def test_views_complex_tensors_and_scalars_are_summed(certificates: Path) -> None:
    def act(group: EncryptedGroup, index: int) -> tuple[Tensor, Tensor, Tensor]:
        view = torch.ones(4, 6)[:, ::2]
        number = torch.full((2,), complex(1, index))
        scalar = torch.tensor(2.0)
        for tensor in (view, number, scalar):
            group.allreduce([tensor]).wait()
        return view, number, scalar

    for view, number, scalar in on_all(certificates, 2, act):
        assert torch.equal(view, torch.full((4, 3), 2.0))
        assert torch.equal(number, torch.full((2,), 2 + 1j))
        assert scalar == 4


def test_sparse_gradients_are_summed(certificates: Path) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        row = torch.sparse_coo_tensor([[index, 3]], torch.ones(2, 2), (4, 2), check_invariants=True)
        group.allreduce([row]).wait()
        return row.to_dense()

    expected = torch.tensor([[1.0, 1], [1, 1], [0, 0], [2, 2]])
    for one in on_all(certificates, 2, act):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("count", [2, 3])
def test_gather_and_scatter_operations(certificates: Path, count: int) -> None:
    def act(group: EncryptedGroup, index: int) -> dict[str, Any]:
        mine = torch.tensor([index, index])
        gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(count)]
        group.allgather([gathered], [mine]).wait()
        flat = torch.zeros(count * 2, dtype=torch.int64)
        group.all_gather_single(flat, mine).wait()
        part = torch.zeros(1, dtype=torch.int64)
        group.reduce_scatter_single(part, torch.arange(count) + index).wait()
        given = torch.zeros(count, dtype=torch.int64)
        group.all_to_all_single(given, torch.arange(count) * 10 + index).wait()
        return {"list": torch.cat(gathered), "flat": flat, "part": part, "given": given}

    for index, one in enumerate(on_all(certificates, count, act)):
        gathered = torch.arange(count).repeat_interleave(2)
        assert torch.equal(one["list"], gathered)
        assert torch.equal(one["flat"], gathered)
        assert one["part"].item() == count * index + sum(range(count))
        assert torch.equal(one["given"], torch.arange(count) + index * 10)


def test_broadcast_reduce_send_and_recv(certificates: Path) -> None:
    def act(group: EncryptedGroup, index: int) -> list[Any]:
        given = torch.tensor([float(index)])
        group.broadcast(given, 2).wait()
        summed = torch.tensor([float(index)])
        group.reduce(summed, 1).wait()
        passed = torch.zeros(1)
        group.send([torch.tensor([index + 10.0])], (index + 1) % 3)
        group.recv([passed], (index - 1) % 3).wait()
        group.barrier().wait()
        return [given.item(), summed.item(), passed.item()]

    assert on_all(certificates, 3, act) == [[2, 0, 12], [2, 3, 10], [2, 2, 11]]


def test_a_future_returns_the_tensors(certificates: Path) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        (tensor,) = group.allreduce([torch.ones(2)]).get_future().wait()
        return tensor

    for one in on_all(certificates, 2, act):
        assert torch.equal(one, torch.full((2,), 2.0))


def test_a_lost_member_ends_the_wait(certificates: Path) -> None:
    with groups(certificates, 2) as (first, second):
        each([lambda g=g: g.barrier().wait() for g in (first, second)])  # type: ignore[misc]
        second.shutdown()
        work = first.allreduce([torch.ones(3)])
        with pytest.raises(LinkError, match="worker 1"):
            work.wait()
        with pytest.raises(LinkError, match="worker 1"):
            first.barrier().wait()


def test_a_silent_member_is_named_at_the_deadline(certificates: Path) -> None:
    with (
        groups(certificates, 2, limit_s=0.3) as (first, _),
        pytest.raises(LinkError, match=r"timed out: worker 1 opened no connection within 0\.3 s"),
    ):
        first.allreduce([torch.ones(3)]).wait()
