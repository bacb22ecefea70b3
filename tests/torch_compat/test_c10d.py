# SPDX-License-Identifier: Apache-2.0
"""torch.distributed except its reducer, which tests/collective/reduction/test_ddp.py covers."""

import ctypes
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fleetlight.torch_compat import c10d

pytestmark = pytest.mark.contract


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of one process, as a script opens it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_all_gather_returns_the_tensor(group: dist.ProcessGroup) -> None:
    mine, gathered = torch.arange(3.0), torch.zeros(3)
    c10d.all_gather_single(gathered, mine, group).wait()
    assert torch.equal(gathered, mine)


def test_reduce_scatter_keeps_one_part_of_the_sum(group: dist.ProcessGroup) -> None:
    part = torch.zeros(3)
    c10d.reduce_scatter_single(part, torch.arange(3.0), group)
    assert part.tolist() == [0, 1, 2]


def test_the_store_of_a_group_accepts_further_keys(group: dist.ProcessGroup) -> None:
    store = c10d.PrefixStore("fleet", c10d.default_store())
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_groups_get_one_more_reference_in_a_child(group: dist.ProcessGroup) -> None:
    before = sys.getrefcount(group)
    c10d.keep_groups_in_child()
    assert sys.getrefcount(group) == before + 1
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def test_a_queued_callback_runs_at_the_end_of_backward() -> None:
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    seen: list[str] = []
    last.register_hook(lambda _: c10d.queue_callback(lambda: seen.append("end")))
    for parameter in (first, last):
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    (last * (first * 2)).sum().backward()
    assert seen == ["gradient", "gradient", "end"]


def test_backward_raises_the_error_of_a_callback() -> None:
    class OurError(Exception):
        """Must keep its type through backward."""

    def fail() -> None:
        raise OurError("at the end")

    parameter = nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda _: c10d.queue_callback(fail))
    with pytest.raises(OurError, match="at the end"):
        (parameter * 2).sum().backward()
