# SPDX-License-Identifier: Apache-2.0
"""Buckets travel in fewer bytes, and the optimizer receives the original type."""

import pytest
import torch
from tests.static.doubling import eager, rewritten, run
from tests.static.nets import batch, net
from tests.static.passes.test_insert_all_reduce import program_of

from fleetlight.collective.buckets import BucketLimits
from fleetlight.static.graph.form import Pass
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Narrow, Overlap
from fleetlight.static.rewriting.all_reduces import all_reduces_of

pytestmark = pytest.mark.slow

INSERT, FUSE = InsertAllReduce(), FuseAllReduce(BucketLimits(bytes=1000, first_bytes=300))
ORDERS: list[tuple[Pass, ...]] = [
    (INSERT, Narrow()),
    (INSERT, FUSE, Narrow(), Overlap()),
    (INSERT, Narrow(), FUSE, Overlap()),
    (INSERT, FUSE, Overlap(), Narrow()),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_buckets_travel_in_the_requested_type(dtype: torch.dtype) -> None:
    doubling, _ = run(program_of(net()).apply(INSERT, FUSE, Narrow(dtype), Overlap()), batch(0))
    assert doubling.types == [dtype, dtype]


@pytest.mark.parametrize("passes", ORDERS, ids=lambda passes: "-".join(p.name for p in passes))
def test_means_equal_those_of_narrow_gradients(passes: tuple[Pass, ...]) -> None:
    ours, theirs = net(), net()
    program = program_of(ours).apply(*passes)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for parameter in theirs.parameters():
        parameter.register_hook(lambda gradient: gradient.half().double())
    torch.manual_seed(0)
    eager(theirs, other, batch(0))
    torch.manual_seed(0)
    run(program, batch(0))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


def test_narrow_buckets_are_not_narrowed_again() -> None:
    form = rewritten(program_of(net()).form, INSERT, FUSE, Narrow(torch.bfloat16))
    assert form.reports[-1].startswith("2 buckets travel as bfloat16: ")
    again = rewritten(form, Narrow())
    assert again.reports[-1] == "0 buckets travel as float16: 0.00 -> 0.00 MiB"
    kinds = [reduction.value.dtype for reduction in all_reduces_of(again.graph)]
    assert kinds == [torch.bfloat16] * 2


def test_fused_buckets_need_two_casts_each() -> None:
    form = rewritten(program_of(net()).form, INSERT, FUSE, Narrow())
    casts = torch.ops.aten._to_copy.default
    assert sum(node.target is casts for node in form.graph.nodes) == 4
