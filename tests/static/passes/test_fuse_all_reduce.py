# SPDX-License-Identifier: Apache-2.0
"""Gradients share buckets, in the order in which backward computes them."""

import pytest
import torch
from tests.static.doubling import eager, reductions, rewritten, run
from tests.static.nets import batch, captured, net
from tests.static.passes.test_insert_all_reduce import Odd, program_of
from tests.static.resnet import captured_resnet50
from torch import nn

from fleetlight import static
from fleetlight.collective.buckets import MIB, BucketLimits
from fleetlight.static.drawing.text import short_name
from fleetlight.static.graph.form import Form
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce
from fleetlight.static.rewriting.all_reduces import all_reduces_of

pytestmark = pytest.mark.slow

SMALL = BucketLimits(bytes=1000, first_bytes=300)


def fused(program: static.Program, limits: BucketLimits) -> Form:
    return rewritten(program.form, InsertAllReduce(), FuseAllReduce(limits))


def sizes(form: Form) -> list[int]:
    return [reduction.value.numel() for reduction in all_reduces_of(form.graph)]


def test_resnet50_needs_5_buckets() -> None:
    form = fused(captured_resnet50(), BucketLimits())
    assert form.reports[-1] == "all_reduce: 161 -> 5 (25 MiB)"
    assert sum(sizes(form)) == 25_557_032
    # the first closes early; all but the last reach their limit
    first, *full, _ = (4 * size for size in sizes(form))
    assert first >= MIB
    assert min(full) >= 25 * MIB
    assert reductions(form.graph) == [
        *(("begin", n) for n in range(5)),
        *(("end", n) for n in range(5)),
    ]


def test_buckets_have_limits_of_count_and_size() -> None:
    assert len(sizes(fused(program_of(net()), BucketLimits(count=4)))) == 2
    assert sizes(fused(program_of(net()), SMALL)) == [39, 132]
    form = fused(program_of(net()), BucketLimits.of(fuse=False, mib=0, count=0))
    assert (len(sizes(form)), form.reports[-1]) == (6, "all_reduce: 6 -> 6")


def test_buckets_do_not_mix_types() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3).double())
    model[1].register_forward_pre_hook(lambda _, given: (given[0].double(),))
    feed = {"x": batch(0)["x"].float(), "y": batch(0)["y"]}
    program = program_of(model, **feed)
    form = fused(program, BucketLimits())
    kinds = [reduction.value.dtype for reduction in all_reduces_of(form.graph)]
    assert kinds == [torch.float64, torch.float32]


def mark_every_other(form: Form) -> Form:
    """Marks every other reduction as hierarchical."""
    graph, _ = form.copied()
    for reduction in all_reduces_of(graph)[::2]:
        reduction.mark(inner=2)
    return form.rewritten(graph, "some go by levels")


def test_hierarchical_and_plain_reductions_share_no_bucket() -> None:
    mark_every_other.name = "by levels"  # type: ignore[attr-defined]
    form = rewritten(program_of(net()).form, InsertAllReduce(), mark_every_other, FuseAllReduce())
    reductions = all_reduces_of(form.graph)
    assert {reduction.inner for reduction in reductions} == {None, 2}
    assert sum(sizes(form)) == sum(p.numel() for p in net().parameters())
    assert len(reductions) == 2


def test_fused_gradients_train_as_before() -> None:
    for make in (net, lambda: Odd().double()):
        for limits in (SMALL, BucketLimits(), BucketLimits(count=1)):
            ours, theirs = make(), make()
            program = program_of(ours).apply(InsertAllReduce(), FuseAllReduce(limits))
            other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
            for number in range(3):
                torch.manual_seed(number)
                eager(theirs, other, batch(number))
                torch.manual_seed(number)
                run(program, batch(number))
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


def test_a_bucket_is_filled_by_one_copy() -> None:
    """Copies made for the reduction disappear; a bucket of one gradient is the gradient."""
    form = fused(program_of(Odd().double()), BucketLimits())
    assert [short_name(node) for node in form.graph.nodes].count("clone") == 1
    alone = fused(program_of(nn.Linear(8, 3, bias=False).double()), BucketLimits())
    operations = [short_name(node) for node in alone.graph.nodes]
    assert not {"cat", "clone", "split_with_sizes"} & set(operations)


def test_unreduced_gradients_can_be_fetched() -> None:
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    name = program.form.node("gradient_5").all_input_nodes[0].name
    torch.manual_seed(0)
    _, [mine, mean] = run(
        program.apply(InsertAllReduce(), FuseAllReduce(SMALL)), batch(0), name, "gradient_5"
    )
    torch.testing.assert_close(mean, 2 * mine)
