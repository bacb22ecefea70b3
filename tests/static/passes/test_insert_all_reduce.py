# SPDX-License-Identifier: Apache-2.0
"""Each gradient is reduced once, in place if possible, before its first use."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.static.doubling import Doubling, eager, reductions, rewritten, run
from tests.static.nets import batch, captured, net
from tests.static.resnet import captured_resnet50
from torch import Tensor, fx, nn

from fleetlight import static
from fleetlight.collective.buckets import MIB, BucketLimits
from fleetlight.errors import PlanError
from fleetlight.static.drawing.text import short_name
from fleetlight.static.graph.fingerprint import fingerprint
from fleetlight.static.graph.form import Form, Pass
from fleetlight.static.ops.reductions import REDUCE, REDUCED, reducing
from fleetlight.static.passes import (
    Compress,
    FuseAllReduce,
    Hierarchical,
    InsertAllReduce,
    Narrow,
    Overlap,
)
from fleetlight.static.rewriting.all_reduces import all_reduces_of, is_carried, members_of
from fleetlight.static.rewriting.nodes import gradients_of, made_by

pytestmark = pytest.mark.slow


def program_of(model: nn.Module, **given: Tensor) -> static.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return static.capture(model, nn.functional.cross_entropy, optimizer, given or batch(0))


def added_operations(program: static.Program) -> list[str]:
    """The operations that the pass adds."""
    before = {node.name for node in program.form.graph.nodes}
    after = rewritten(program.form, InsertAllReduce()).graph.nodes
    return [short_name(node) for node in after if node.name not in before]


def test_all_reductions_begin_after_backward_and_then_end() -> None:
    form = rewritten(program_of(net()).form, InsertAllReduce())
    assert form.reports == ("6 gradients, each reduced separately",)
    begins = [("begin", n) for n in range(6)]
    assert reductions(form.graph) == begins + [("end", n) for n in range(6)]


def adam(parameters: Any, lr: float) -> torch.optim.Adam:
    """With the usual eps, the last digit of a gradient near zero moves a parameter by 1e-12."""
    return torch.optim.Adam(parameters, lr, eps=1e-4)


@pytest.mark.parametrize("kind", [torch.optim.SGD, adam], ids=["SGD", "Adam"])
def test_the_optimizer_uses_reduced_gradients(kind: Any) -> None:
    ours, theirs = net(), net()
    mine, other = (kind(m.parameters(), lr=0.01) for m in (ours, theirs))
    program = captured(ours, mine).apply(InsertAllReduce())
    for number in range(4):
        torch.manual_seed(number)
        expected = eager(theirs, other, batch(number))
        torch.manual_seed(number)
        doubling, [loss] = run(program, batch(number), "loss")
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        assert len(doubling.log) == 12
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


class Odd(nn.Module):
    """Its gradients are transposed, expanded, shared, scalar, and three-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.randn(8, 3))
        self.added, self.too = (nn.Parameter(torch.randn(3)) for _ in range(2))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.cube = nn.Parameter(torch.randn(2, 3, 8))
        self.once = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.turned + (self.added + self.too)
        return (out + torch.einsum("bi,koi->bo", x, self.cube)) * self.number + self.once.sum()


def test_gradients_of_all_layouts_are_reduced() -> None:
    ours, theirs = Odd().double(), Odd().double()
    program = program_of(ours).apply(InsertAllReduce())
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        eager(theirs, other, batch(number))
        run(program, batch(number))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


def test_gradients_with_own_memory_are_not_copied() -> None:
    """Gradients of linear layers are transposed; their rows are views."""
    assert not {"clone", "cat", "_to_copy"} & set(added_operations(program_of(net())))
    turned = nn.Linear(3, 8, bias=False).double()

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = turned.weight

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    assert "clone" not in added_operations(program_of(Turned()))


def test_gradients_that_others_read_are_copied() -> None:
    program = program_of(Odd().double())
    # `added` and `too` have one gradient; those of `once` and `cube` are expanded
    assert added_operations(program).count("clone") == 4
    model = net()
    seen = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    recorder = seen.writable_source().recorder
    marks = [n for n in recorder.graph.nodes if "gradient" in str(n.target)]
    recorder.names["gradient of the last bias"] = marks[-1].all_input_nodes[0]
    assert added_operations(seen).count("clone") == 1


def test_a_program_without_gradients_is_unchanged() -> None:
    program = static.capture(net(), nn.functional.cross_entropy, None, batch(0))
    form = rewritten(program.form, InsertAllReduce())
    assert form.reports == ("0 gradients, each reduced separately",)
    assert str(form.graph) == str(program.form.graph)


# -- gradients share buckets, in the order in which backward computes them ------------------------

SMALL = BucketLimits(bytes=1000, first_bytes=300)
INSERT, FUSE = InsertAllReduce(), FuseAllReduce(SMALL)


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


# -- reductions begin after their last gradient and end before the first use of their means -------

ALONE, FUSED = (InsertAllReduce(), Overlap()), (InsertAllReduce(), FUSE, Overlap())
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


# -- buckets travel in fewer bytes, and the optimizer receives the original type ------------------

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


# -- the pass marks all-reduces as hierarchical and changes nothing else --------------------------

LEVELS = ([[0, 1], [2, 3]], [[0, 2]])
BY_HOSTS = Hierarchical(0, LEVELS)
ORDERS_BY_HOSTS: list[tuple[Pass, ...]] = [
    (INSERT, BY_HOSTS),
    (INSERT, FUSE, BY_HOSTS, Overlap()),
    (INSERT, BY_HOSTS, FUSE, Narrow(), Overlap()),
    (INSERT, FUSE, Overlap(), BY_HOSTS),
]


@pytest.mark.parametrize(
    "passes", ORDERS_BY_HOSTS, ids=lambda passes: "-".join(p.name for p in passes)
)
def test_every_bucket_begins_as_hierarchical(passes: tuple[Pass, ...]) -> None:
    program = program_of(net()).apply(*passes)
    doubling, _ = run(program, batch(0))
    assert doubling.inner == [0] * len(all_reduces_of(program.form.graph))
    assert doubling.inner


def test_the_report_names_groups_and_leaders() -> None:
    form = rewritten(program_of(net()).form, INSERT, FUSE, Hierarchical(2, LEVELS))
    report = "2 all-reduces are hierarchical: 2 groups of 2, then 2 leaders"
    assert form.reports[-1] == report
    narrow = rewritten(form, Hierarchical(2, LEVELS, torch.bfloat16))
    assert narrow.reports[-1] == f"{report} in bfloat16"


def test_levels_are_part_of_the_fingerprint() -> None:
    form = program_of(net()).form
    fingerprints = {
        fingerprint(rewritten(form, INSERT, *more))
        for more in ((), (BY_HOSTS,), (Hierarchical(2, LEVELS),))
    }
    assert len(fingerprints) == 3


# -- large gradients are marked with a codec and keep the value order of their parameters ---------

FUSE_ALL = FuseAllReduce()
MATRICES = Compress("int8", lambda parameter: parameter.dim() > 1, lambda values: values)


def coded(form: Form) -> dict[str, list[list[str]]]:
    """The names of parameters in each bucket, by codec."""
    members = members_of(form.graph)
    found: dict[str, list[list[str]]] = {}
    for reduction in all_reduces_of(form.graph):
        names = [str(mark.args[1]) for mark in members[reduction.index]]
        found.setdefault(str(reduction.begin.kwargs.get("codec")), []).append(names)
    return found


def test_only_gradients_of_covered_parameters_are_marked() -> None:
    form = rewritten(program_of(net()).form, INSERT, MATRICES)
    found = coded(form)
    assert sorted(found["int8"]) == [["0.weight"], ["4.weight"]]
    assert len(found["None"]) == 4
    # 132 of 171 values travel as one byte
    before, after = 171 * 8 / 2**20, (132 + 39 * 8) / 2**20
    assert form.reports[-1] == f"2 of 6 gradients travel as int8: {before:.2f} -> {after:.2f} MiB"


@pytest.mark.parametrize(
    "passes",
    [(FUSE_ALL, Overlap()), (FUSE_ALL,)],
    ids=lambda passes: "-".join(p.name for p in passes),
)
def test_marked_gradients_share_buckets_in_a_fixed_order(passes: tuple[Pass, ...]) -> None:
    found = coded(rewritten(program_of(net()).form, INSERT, MATRICES, *passes))
    assert found["int8"] == [["4.weight", "0.weight"]]
    assert [sorted(names) for names in found["None"]] == [
        ["0.bias", "1.bias", "1.weight", "4.bias"]
    ]


def test_compress_after_fusing_is_refused() -> None:
    with pytest.raises(PlanError, match="compress must run before the pass that fuses"):
        rewritten(program_of(net()).form, INSERT, FUSE_ALL, MATRICES)


class KeepsBuckets(Doubling):
    """Keeps the values of each bucket when its reduction begins."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Tensor] = {}

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        self.held[index] = bucket.clone()
        super().begin(index, bucket, inner)


class Turned(nn.Module):
    """Backward computes the gradient in another layout than the parameter's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 8).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t().contiguous()


@pytest.mark.parametrize("limits", [BucketLimits(), BucketLimits(count=1)], ids=["fused", "single"])
def test_bucket_values_have_the_order_of_their_parameters(limits: BucketLimits) -> None:
    ours, theirs = nn.Sequential(Turned()), nn.Sequential(Turned())
    captured = program_of(ours)
    assert not made_by(gradients_of(captured.form.graph)[0]).meta["val"].is_contiguous()
    program = captured.apply(INSERT, MATRICES, FuseAllReduce(limits), Overlap())
    reductions = KeepsBuckets()
    eager(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), batch(0))
    with reducing(reductions):
        static.Executor().run(program, batch(0), [])
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
    doubled = theirs[0].weight.grad
    assert isinstance(doubled, Tensor)
    torch.testing.assert_close(reductions.held[0], doubled.flatten() / 2)


def test_marked_gradients_train_as_before() -> None:
    ours, theirs = net(), net()
    program = program_of(ours).apply(INSERT, MATRICES, FUSE_ALL, Overlap())
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        torch.manual_seed(number)
        eager(theirs, other, batch(number))
        torch.manual_seed(number)
        run(program, batch(number))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
