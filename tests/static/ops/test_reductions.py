# SPDX-License-Identifier: Apache-2.0
"""Programs with reduced gradients train as one process does on all batches."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests import workers
from tests.ps.layers.devices import as_on_a_gpu
from tests.static.doubling import Doubling
from tests.static.nets import batch, net
from tests.static.resnet import images, resnet50
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fleetlight import static
from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.data_parallel.replica import Reduction, reducer_of
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import BLANK, GradientStamp, Position
from fleetlight.errors import PlanError
from fleetlight.fleet.job import current
from fleetlight.static.ops import rows as operations
from fleetlight.static.ops.marks import is_dense, laid_out
from fleetlight.static.ops.reductions import REDUCE, REDUCED, GroupReductions, reducing
from fleetlight.static.ops.rows import GATHER_BAGS, GATHER_ROWS, SUM_BAGS, SUM_ROWS, WEIGH_BAGS
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Overlap

STAMP = GradientStamp(Position(1, 7), 9)


class DoublingRoute:
    """A route that doubles buckets in finish(), which can fail."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.started: list[tuple[Tensor, Future[Tensor]]] = []
        self.stamp_calls = 0

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        self.started.append((bucket.buffer, Future()))
        return self.started[-1][1]

    def finish(self) -> None:
        for tensor, future in self.started:
            future.set_result(tensor.mul_(2))
        self.started.clear()
        if self.error:
            raise RuntimeError(self.error)

    def stamps(self) -> Mapping[int, GradientStamp]:
        self.stamp_calls += 1
        return {0: BLANK}

    def close(self) -> None:
        pass


class PlainGroup:
    """A group that passes errors unchanged."""

    @contextlib.contextmanager
    def named(self, operation: str) -> Iterator[None]:
        yield


def reductions_by(
    route: DoublingRoute, stamps: list[Mapping[int, GradientStamp]]
) -> GroupReductions:
    reductions = GroupReductions({None: Reducer(1, [], route=route)}, PlainGroup(), stamps.append)
    reductions.prepare(BLANK)
    return reductions


def test_reducing_outside_a_job_is_refused_with_advice() -> None:
    for operation in (REDUCE, REDUCED):
        with pytest.raises(PlanError, match=r"there is no job: run it with static\.Executor"):
            operation(torch.ones(2), 0)
    with reducing(Doubling()):
        REDUCE(torch.ones(2), 0)
    with pytest.raises(PlanError):
        REDUCE(torch.ones(2), 0)


def test_fake_and_meta_tensors_are_not_reduced() -> None:
    with FakeTensorMode():
        REDUCE(torch.ones(2), 0, inner=2, codec="int8")
    REDUCED(torch.ones(2, device="meta"), 0)


def test_buckets_reduce_in_place_and_report_stamps_at_the_end() -> None:
    stamps: list[Mapping[int, GradientStamp]] = []
    route = DoublingRoute()
    buckets = [torch.ones(2), torch.ones(3)]
    with reducing(reductions_by(route, stamps)):
        for index, bucket in enumerate(buckets):
            REDUCE(bucket, index)
        REDUCED(buckets[0], 0)
        assert stamps == []
        # a compiler may copy the bucket
        moved = torch.zeros(3)
        REDUCED(moved, 1, buckets[0])
    assert stamps == [{0: BLANK}]
    assert [t.tolist() for t in (*buckets, moved)] == [[2, 2], [2, 2, 2], [2, 2, 2]]


def test_the_first_failure_is_raised_and_clears_the_state() -> None:
    stamps: list[Mapping[int, GradientStamp]] = []
    route = DoublingRoute("the cable is out")
    reductions = reductions_by(route, stamps)
    with reducing(reductions):
        for index in range(2):
            REDUCE(torch.ones(2), index)
        with pytest.raises(RuntimeError, match="the cable is out"):
            REDUCED(torch.ones(2), 0)
        assert (stamps, route.started) == ([], [])
        route.error = ""
        reductions.prepare(BLANK)
        bucket = torch.ones(2)
        REDUCE(bucket, 0)
        REDUCED(bucket, 0)
    assert (bucket.tolist(), len(stamps)) == ([2, 2], 1)


def test_each_bucket_uses_the_reducer_of_its_levels() -> None:
    stamps: list[Mapping[int, GradientStamp]] = []
    routes = {None: DoublingRoute(), 0: DoublingRoute(), 2: DoublingRoute()}
    group: Any = PlainGroup()
    reducers = {inner: Reducer(1, [], route=route) for inner, route in routes.items()}
    reductions = GroupReductions(reducers, group, stamps.append)
    reductions.prepare(STAMP, {1: (ParameterSlice("a", 1), ParameterSlice("b", 1))})
    buckets = [torch.ones(2), torch.ones(2)]
    with reducing(reductions):
        REDUCE(buckets[0], 0)
        REDUCE(buckets[1], 1, inner=0)
        assert [len(route.started) for route in routes.values()] == [1, 1, 0]
        REDUCED(buckets[0], 0)
        assert stamps == []
        REDUCED(buckets[1], 1)
    # the third reducer reduces nothing and has no stamps
    assert [route.stamp_calls for route in routes.values()] == [1, 1, 0]
    assert [reducer.stamp for reducer in reducers.values()] == [STAMP] * 3
    assert [bucket.tolist() for bucket in buckets] == [[2, 2], [2, 2]]


def test_a_failure_finishes_the_other_reducers() -> None:
    routes = {None: DoublingRoute("the cable is out"), 0: DoublingRoute()}
    group: Any = PlainGroup()
    reducers = {inner: Reducer(1, [], route=route) for inner, route in routes.items()}
    reductions = GroupReductions(reducers, group)
    reductions.prepare(BLANK)
    with reducing(reductions):
        REDUCE(torch.ones(2), 0)
        REDUCE(torch.ones(2), 1, inner=0)
        with pytest.raises(RuntimeError, match="the cable is out"):
            REDUCED(torch.ones(2), 0)
    assert routes[0].started == []


# -- with real workers


def plain_ddp(model: nn.Module, feeds: list[dict[str, Tensor]]) -> None:
    """DistributedDataParallel of torch, on the present process group."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    replica = DistributedDataParallel(model, broadcast_buffers=False)
    for number, feed in enumerate(feeds):
        torch.manual_seed(number + 10 * dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(feed["x"]), feed["y"]).backward()
        optimizer.step()


def program(model: nn.Module, feeds: list[dict[str, Tensor]], shared: bool) -> None:
    """A program whose gradients the workers of the job reduce."""
    group = current().group
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    captured = static.capture(model, nn.functional.cross_entropy, optimizer, feeds[0])
    ours = captured.apply(InsertAllReduce(), FuseAllReduce(), Overlap())
    reducer = reducer_of(group, Reduction(shared_memory=shared))
    reductions = GroupReductions({None: reducer}, group)
    executor = static.Executor()
    for number, feed in enumerate(feeds):
        torch.manual_seed(number + 10 * group.index)
        reductions.prepare(BLANK)
        with reducing(reductions):
            executor.run(ours, feed)
    reducer.close()


def resnet() -> nn.Module:
    return resnet50().double()


def difference(make: Callable[[], nn.Module], feed: Any, shared: bool) -> float:
    """The largest difference of parameters and buffers after five steps."""
    index = current().group.index
    feeds = [feed(2 * number + index) for number in range(5)]
    first = make()
    theirs, ours = copy.deepcopy(first), copy.deepcopy(first)
    plain_ddp(theirs, feeds)
    program(ours, feeds, shared)
    before, expected, found = (dict(model.state_dict()) for model in (first, theirs, ours))
    assert all(not torch.equal(before[name], found[name]) for name in before)
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("make", "feed", "shared"),
    [
        pytest.param(net, batch, False, id="net by gloo"),
        pytest.param(net, batch, True, id="net by shared memory"),
        pytest.param(
            resnet, functools.partial(images, size=16), True, id="ResNet-50", marks=pytest.mark.long
        ),
    ],
)
def test_two_workers_equal_plain_ddp(
    make: Any, feed: Any, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ResNet-50 takes ten seconds, or many more on a busy machine
    monkeypatch.setattr(workers, "LIMIT_S", 300.0)
    assert max(workers.run_workers(difference, 2, make, feed, shared, deadline_s=100)) < 1e-12


# -- operations on pulled rows compute what the layers of torch compute ---------------------------


def drawn() -> tuple[Tensor, Tensor]:
    """Rows, and the positions of a batch among them."""
    torch.manual_seed(0)
    return torch.randn(5, 3), torch.randint(0, 5, (4, 2), dtype=torch.int32)


def test_rows_are_gathered_and_gradients_summed() -> None:
    rows, places = drawn()
    rows.requires_grad_()
    expected = F.embedding(places.long(), rows)
    found = GATHER_ROWS(rows.detach(), places, torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected.detach())
    gradient = torch.randn(4, 2, 3)
    (2 * expected * gradient).sum().backward()  # type: ignore[no-untyped-call]
    # several lookups together, of any shape and type
    summed = SUM_ROWS([gradient.double(), gradient.view(8, 3)], [places, places.view(8)], rows)
    torch.testing.assert_close(summed, rows.grad)


KINDS = [("sum", True), ("sum", False), ("mean", False), ("max", False)]
#: bounds of bags of eight places: none is empty, some are, all are
BOUNDS = ([0, 3, 8], [0, 0, 3, 3, 8, 8], [0])


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize(("mode", "weighed"), KINDS)
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_bags_equal_embedding_bag(
    as_on_gpu: bool, mode: str, weighed: bool, bounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_gpu:
        as_on_a_gpu(monkeypatch)
    rows, places = drawn()
    rows.requires_grad_()
    count = bounds[-1]
    each = torch.rand(count, requires_grad=True) if weighed else None
    flat, ends = places.view(8)[:count], torch.tensor(bounds)
    expected = F.embedding_bag(
        flat.long(), rows, ends, mode=mode, per_sample_weights=each, include_last_offset=True
    )
    gradient = torch.randn(expected.shape)
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    given: Any = rows.detach(), flat, ends
    weights = None if each is None else each.detach()
    found, chosen = GATHER_BAGS(*given, weights, mode, torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected.detach())
    assert chosen.shape == (found.shape if mode == "max" else (0,))
    assert chosen.dtype == torch.int32
    summed = SUM_BAGS(gradient.double(), *given, weights, mode, chosen)
    torch.testing.assert_close(summed, rows.grad)
    if each is not None:
        torch.testing.assert_close(WEIGH_BAGS(gradient.double(), *given, weights), each.grad)


def test_bags_on_a_gpu_never_reach_a_kernel_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)

    def refused(*given: Any) -> Any:
        raise AssertionError("copied to main memory")

    monkeypatch.setattr(operations, "_array", refused)
    monkeypatch.setattr(operations, "_flat", refused)
    rows, places = drawn()
    given: Any = rows, places.view(8), torch.tensor([0, 3, 8])
    found, chosen = GATHER_BAGS(*given, torch.ones(8), "sum", torch.float32)
    SUM_BAGS(found, *given, torch.ones(8), "sum", chosen)
    WEIGH_BAGS(found, *given, torch.ones(8))
    SUM_ROWS([GATHER_ROWS(rows, places, torch.float32)], [places], rows)


def test_operations_support_fake_tensors() -> None:
    rows, places = drawn()
    bounds, each = torch.tensor([0, 3, 8]), torch.rand(8)
    flat, gradient = places.view(8), torch.randn(2, 3)
    for op, args in (
        (GATHER_ROWS, (rows, places, torch.float32)),
        (SUM_ROWS, ([torch.randn(4, 2, 3)], [places], rows)),
        (GATHER_BAGS, (rows, flat, bounds, each, "sum", torch.float32)),
        (GATHER_BAGS, (rows, flat, bounds, None, "max", torch.float32)),
        (SUM_BAGS, (gradient, rows, flat, bounds, each, "sum", torch.empty(0))),
        (WEIGH_BAGS, (gradient, rows, flat, bounds, each)),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


# -- fused steps receive each gradient in the memory layout of its parameter ----------------------


def test_a_gradient_in_the_right_layout_is_not_copied() -> None:
    parameter = torch.zeros(3, 1, 4)
    for gradient in (torch.rand(3, 1, 4), torch.rand(3, 4, 1).transpose(1, 2)):
        assert laid_out(gradient, parameter) is gradient


def test_a_gradient_in_another_layout_is_copied() -> None:
    parameter, gradient = torch.zeros(3, 4), torch.rand(4, 3).t()
    found = laid_out(gradient, parameter)
    assert found.stride() == parameter.stride()
    assert torch.equal(found, gradient)


def test_dense_layouts_are_recognised() -> None:
    whole = torch.zeros(3, 4)
    assert is_dense(whole)
    assert is_dense(whole.t())
    assert not is_dense(whole[:, :2])
    assert not is_dense(whole[:1].expand(3, 4))


class Odd(nn.Module):
    """Its parameters have layouts that gradients usually have not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.rand(3, 4).double())
        self.sliced = nn.Parameter(torch.rand(3, 8).double()[:, :4])
        self.conv = nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.conv(x).mean((2, 3))
        return nn.functional.linear(rows, self.turned.t().contiguous().tanh()) @ self.sliced.t()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_parameters_of_any_layout_train_as_in_eager_mode(kind: Any) -> None:
    ours, theirs = Odd(), Odd()
    options = {"lr": 0.1, "weight_decay": 0.01}
    groups = [[m.turned, *m.conv.parameters()] for m in (ours, theirs)]
    mine, other = (
        kind([{"params": group}, {"params": [m.sliced]}], **options)
        for group, m in zip(groups, (ours, theirs), strict=True)
    )
    given = {"x": torch.rand(5, 2, 4, 4).double(), "y": torch.rand(5, 3).double()}
    program = static.capture(ours, nn.functional.mse_loss, mine, given)
    # the group with the sliced parameter has no fused step
    assert "_foreach_" in str(program)
    assert "_fused_" in str(program)
    executor = static.Executor()
    for _ in range(4):
        executor.run(program, given)
        other.zero_grad()
        nn.functional.mse_loss(theirs(given["x"]), given["y"]).backward()
        other.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-12)
