# SPDX-License-Identifier: Apache-2.0
"""torch.distributed beside its reducer, which tests/collective/reduction/test_ddp.py is about."""

from __future__ import annotations

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
    """A process group of this process alone, as a script opens it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_tensor_comes_to_all(group: dist.ProcessGroup) -> None:
    mine, everybody = torch.arange(3.0), torch.zeros(3)
    c10d.all_gather_single(everybody, mine, group).wait()
    assert torch.equal(everybody, mine)


def test_one_part_of_a_sum_is_kept(group: dist.ProcessGroup) -> None:
    part = torch.zeros(3)
    c10d.reduce_scatter_single(part, torch.arange(3.0), group)
    assert part.tolist() == [0, 1, 2]


def test_the_store_of_a_group_takes_more(group: dist.ProcessGroup) -> None:
    store = c10d.PrefixStore("fleet", c10d.default_store())
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_groups_are_held_once_more_in_a_child(group: dist.ProcessGroup) -> None:
    before = sys.getrefcount(group)
    c10d.keep_groups_in_child()
    assert sys.getrefcount(group) == before + 1
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def test_a_callback_comes_at_the_end_of_backward() -> None:
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    seen: list[str] = []
    last.register_hook(lambda _: c10d.queue_callback(lambda: seen.append("end")))
    for parameter in (first, last):
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    (last * (first * 2)).sum().backward()
    assert seen == ["gradient", "gradient", "end"]


def test_what_a_callback_raises_backward_raises() -> None:
    class OurError(Exception):
        """Has its own type on the other side as well."""

    def fail() -> None:
        raise OurError("at the end")

    parameter = nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda _: c10d.queue_callback(fail))
    with pytest.raises(OurError, match="at the end"):
        (parameter * 2).sum().backward()
