# SPDX-License-Identifier: Apache-2.0
"""Reductions begin after their last gradient and end before the first use of their means."""

from collections.abc import Iterator

import pytest
import torch
from tests.static.doubling import eager, reductions, rewritten, run
from tests.static.nets import batch, net
from tests.static.passes.test_insert_all_reduce import Odd, program_of
from tests.static.resnet import captured_resnet50
from torch import fx

from fleetlight.collective.buckets import BucketLimits
from fleetlight.static.graph.form import Pass
from fleetlight.static.ops.reductions import REDUCE, REDUCED
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Overlap
from fleetlight.static.rewriting.all_reduces import all_reduces_of, is_carried

pytestmark = pytest.mark.slow

SMALL = FuseAllReduce(BucketLimits(bytes=1000, first_bytes=300))
ALONE, FUSED = (InsertAllReduce(), Overlap()), (InsertAllReduce(), SMALL, Overlap())
both = pytest.mark.parametrize("passes", [FUSED, ALONE], ids=["fused", "alone"])


def computing(graph: fx.Graph) -> list[fx.Node]:
    """All operations except views, copies and reductions."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [n for n in calls if not is_carried(n) and n.target not in (REDUCE, REDUCED)]


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """The operations that compute the content of a bucket."""
    for source in node.all_input_nodes[:1] if node.target is REDUCE else node.all_input_nodes:
        yield from sources(source) if is_carried(source) else (source,)


def users(node: fx.Node) -> Iterator[fx.Node]:
    """The operations that use the means of a bucket."""
    for user in node.users:
        if user.target not in (REDUCE, REDUCED):
            yield from users(user) if is_carried(user) else (user,)


def test_resnet50_begins_4_of_5_reductions_during_backward() -> None:
    form = rewritten(captured_resnet50().form, InsertAllReduce(), FuseAllReduce(), Overlap())
    assert form.reports[-1] == "4 of 5 all-reduces begin before backward ends"
    backward = [n for n in computing(form.graph) if n.meta["part"] == "backward"]
    done = [
        sum(node < reduction.begin for node in backward) / len(backward)
        for reduction in all_reduces_of(form.graph)
    ]
    assert done == sorted(done)
    assert done[0] < 0.1
    assert done[3] < done[4] == 1


@both
def test_a_reduction_begins_right_after_its_last_gradient(passes: tuple[Pass, ...]) -> None:
    graph = rewritten(program_of(net()).form, *passes).graph
    for reduction in all_reduces_of(graph):
        before = [node for node in computing(graph) if node < reduction.begin]
        assert before[-1] is max(sources(reduction.begin))


@both
def test_a_reduction_ends_right_before_its_means_are_used(passes: tuple[Pass, ...]) -> None:
    """Or before the end of the next one, whose means are used first."""
    graph = rewritten(program_of(net()).form, *passes).graph
    following: list[fx.Node] = []
    for reduction in reversed(all_reduces_of(graph)):
        used = (user for user in users(reduction.bucket) if reduction.end < user)
        first = min((*used, *following))
        assert not [node for node in computing(graph) if reduction.end < node < first]
        assert reduction.end < first
        following = [reduction.end]


@both
def test_reductions_keep_their_order_by_data_dependencies(passes: tuple[Pass, ...]) -> None:
    graph = rewritten(program_of(net()).form, *passes).graph
    count = len(all_reduces_of(graph))
    turns = [("begin", n) for n in range(count)] + [("end", n) for n in range(count)]
    assert reductions(graph) == turns
    steps = [node for node in graph.nodes if node.target in (REDUCE, REDUCED)]
    assert [n.args[2] for n in steps[1:]] == [n.args[0] for n in steps[:-1]]


@both
@pytest.mark.parametrize("make", [net, lambda: Odd().double()], ids=["net", "odd"])
def test_overlap_does_not_change_the_results(passes: tuple[Pass, ...], make: type[Odd]) -> None:
    ours, theirs = make(), make()
    program = program_of(ours).apply(*passes)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        torch.manual_seed(number)
        expected = eager(theirs, other, batch(number))
        torch.manual_seed(number)
        doubling, [loss] = run(program, batch(number), "loss")
        assert doubling.log == reductions(program.form.graph)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


def test_a_reader_of_the_unreduced_gradient_stays_before() -> None:
    """The gradient is reduced in place, and an operation takes its norm."""
    form = rewritten(program_of(net()).form, InsertAllReduce())
    graph, _ = form.copied()
    reduction = all_reduces_of(graph)[0]
    with graph.inserting_before(reduction.begin):
        norm = graph.call_function(torch.ops.aten.sum.default, (reduction.bucket,))
        norm.meta.update(reduction.bucket.meta, part="backward")
    moved = Overlap()(form.rewritten(graph, "")).graph
    assert next(n for n in moved.nodes if n.name == norm.name) < all_reduces_of(moved)[0].begin
