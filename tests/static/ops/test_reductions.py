# SPDX-License-Identifier: Apache-2.0
"""Programs whose gradients are reduced train as one process does on all batches."""

from __future__ import annotations

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


class Late:
    """A route that doubles buckets when it is asked to finish, or fails to."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.started: list[tuple[Tensor, Future[Tensor]]] = []
        self.asked = 0

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
        self.asked += 1
        return {0: BLANK}

    def close(self) -> None:
        pass


class Nobody:
    """A group in which errors stay what they are."""

    @contextlib.contextmanager
    def named(self, operation: str) -> Iterator[None]:
        yield


def reductions_by(route: Late, told: list[Mapping[int, GradientStamp]]) -> GroupReductions:
    nobody: Any = Nobody()
    made = GroupReductions({None: Reducer(1, [], route=route)}, nobody, told.append)
    made.prepare(BLANK)
    return made


def test_outside_of_a_job_it_is_said_what_to_do() -> None:
    for operation in (REDUCE, REDUCED):
        with pytest.raises(PlanError, match=r"there is no job: run it with static\.Executor"):
            operation(torch.ones(2), 0)
    with reducing(Doubling()):
        REDUCE(torch.ones(2), 0)
    with pytest.raises(PlanError):
        REDUCE(torch.ones(2), 0)


def test_tensors_without_values_are_not_reduced() -> None:
    with FakeTensorMode():
        REDUCE(torch.ones(2), 0, inner=2, codec="int8")
    REDUCED(torch.ones(2, device="meta"), 0)


def test_the_bucket_is_reduced_where_it_is_and_stamps_are_seen_once_all_are_back() -> None:
    told: list[Mapping[int, GradientStamp]] = []
    route = Late()
    buckets = [torch.ones(2), torch.ones(3)]
    with reducing(reductions_by(route, told)):
        for index, bucket in enumerate(buckets):
            REDUCE(bucket, index)
        REDUCED(buckets[0], 0)
        assert told == []
        # a compiler may have moved it
        moved = torch.zeros(3)
        REDUCED(moved, 1, buckets[0])
    assert told == [{0: BLANK}]
    assert [t.tolist() for t in (*buckets, moved)] == [[2, 2], [2, 2, 2], [2, 2, 2]]


def test_the_first_failure_is_raised_and_nothing_stays_behind() -> None:
    told: list[Mapping[int, GradientStamp]] = []
    route = Late("the cable is out")
    reductions = reductions_by(route, told)
    with reducing(reductions):
        for index in range(2):
            REDUCE(torch.ones(2), index)
        with pytest.raises(RuntimeError, match="the cable is out"):
            REDUCED(torch.ones(2), 0)
        assert (told, route.started) == ([], [])
        route.error = ""
        reductions.prepare(BLANK)
        bucket = torch.ones(2)
        REDUCE(bucket, 0)
        REDUCED(bucket, 0)
    assert (bucket.tolist(), len(told)) == ([2, 2], 1)


def test_buckets_go_by_the_reducer_of_their_levels_and_each_tells_its_stamps() -> None:
    told: list[Mapping[int, GradientStamp]] = []
    routes = {None: Late(), 0: Late(), 2: Late()}
    nobody: Any = Nobody()
    reducers = {inner: Reducer(1, [], route=route) for inner, route in routes.items()}
    reductions = GroupReductions(reducers, nobody, told.append)
    reductions.prepare(STAMP, {1: (ParameterSlice("a", 1), ParameterSlice("b", 1))})
    buckets = [torch.ones(2), torch.ones(2)]
    with reducing(reductions):
        REDUCE(buckets[0], 0)
        REDUCE(buckets[1], 1, inner=0)
        assert [len(route.started) for route in routes.values()] == [1, 1, 0]
        REDUCED(buckets[0], 0)
        assert told == []
        REDUCED(buckets[1], 1)
    # the third has reduced nothing, and has no stamps
    assert [route.asked for route in routes.values()] == [1, 1, 0]
    assert [reducer.stamp for reducer in reducers.values()] == [STAMP] * 3
    assert [bucket.tolist() for bucket in buckets] == [[2, 2], [2, 2]]


def test_a_failure_ends_what_other_reducers_have_begun() -> None:
    routes = {None: Late("the cable is out"), 0: Late()}
    nobody: Any = Nobody()
    reducers = {inner: Reducer(1, [], route=route) for inner, route in routes.items()}
    reductions = GroupReductions(reducers, nobody)
    reductions.prepare(BLANK)
    with reducing(reductions):
        REDUCE(torch.ones(2), 0)
        REDUCE(torch.ones(2), 1, inner=0)
        with pytest.raises(RuntimeError, match="the cable is out"):
            REDUCED(torch.ones(2), 0)
    assert routes[0].started == []


# -- with real workers


def plain_ddp(model: nn.Module, feeds: list[dict[str, Tensor]]) -> None:
    """torch's own, on the process group that is there."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    replica = DistributedDataParallel(model, broadcast_buffers=False)
    for number, feed in enumerate(feeds):
        torch.manual_seed(number + 10 * dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(feed["x"]), feed["y"]).backward()
        optimizer.step()


def program(model: nn.Module, feeds: list[dict[str, Tensor]], shared: bool) -> None:
    """A program, reduced by the workers of the job."""
    group = current().group
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = nn.functional.cross_entropy
    captured = static.capture(model, loss, optimizer, feeds[0])
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
    """Of parameters and buffers after five steps, at most."""
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
            resnet,
            functools.partial(images, size=16),
            True,
            id="ResNet-50",
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_workers_equal_plain_ddp(
    make: Any, feed: Any, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ResNet-50 takes ten seconds, or many more on a busy machine
    monkeypatch.setattr(workers, "LIMIT_S", 300.0)
    found = workers.run_workers(difference, 2, make, feed, shared, deadline_s=100)
    assert max(found) < 1e-12
