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
from tests import workers
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
from fleetlight.static.ops.reductions import REDUCE, REDUCED, GroupReductions, reducing
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
