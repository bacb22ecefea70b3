# SPDX-License-Identifier: Apache-2.0
"""What Fleetlight relies on in torch's C++ reducer, whose interface is not public."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.workers import run_workers
from torch import nn

from fleetlight.collective.buckets import BucketLimits, flat_of
from fleetlight.collective.reduction.ddp import BackwardBuckets
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket

pytestmark = pytest.mark.multiprocess


def buckets_seen(limits: BucketLimits, steps: int) -> list[list[tuple[int, bool, int]]]:
    """The calls of `on_bucket` in each backward, in order with the first layer's gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    group = dist.group.WORLD
    assert group is not None
    reducer = Reducer(2, [group])
    events: list[Any] = []

    def on_bucket(index: int, is_last: bool, buffer: torch.Tensor) -> Any:
        events.append((index, is_last, buffer.numel()))
        return reducer.reduce(Bucket(index, buffer))

    buckets = BackwardBuckets(
        list(model.named_parameters()),
        sparse=set(),
        limits=limits,
        group=group,
        find_unused=False,
        on_bucket=on_bucket,
    )
    model[0].weight.register_hook(lambda grad: events.append("first layer"))
    seen = []
    for _ in range(steps):
        events.clear()
        buckets.before_forward()
        output = model(torch.randn(4, 64))
        buckets.after_forward([])
        output.sum().backward()
        seen.append(list(events))
    del buckets
    return seen


def test_buckets_are_issued_during_backward() -> None:
    layer = (64 * 64 + 64) * 4
    limits = BucketLimits(bytes=2 * layer, first_bytes=layer)
    for seen in run_workers(buckets_seen, 2, limits, 3):
        # the first layer's gradient is computed last; by then most buckets are issued
        for events in seen[1:]:
            issued = [e for e in events[: events.index("first layer")] if e != "first layer"]
            assert len(issued) >= 2
        final = [e for e in seen[-1] if e != "first layer"]
        assert [e[0] for e in final] == list(range(len(final)))
        assert [e[1] for e in final] == [False] * (len(final) - 1) + [True]
        assert sum(e[2] for e in final) == 6 * (64 * 64 + 64)


def test_a_bucket_respects_the_count_limit() -> None:
    for seen in run_workers(buckets_seen, 2, BucketLimits(count=5), 3):
        for events in seen:
            # 12 gradients, a bias and a weight in turn from the last layer: 5, 5, 2
            sizes = [e[2] for e in events if e != "first layer"]
            assert sizes == [2 * 4096 + 3 * 64, 3 * 4096 + 2 * 64, 4096 + 64]


def gradients_are_reduced() -> list[Any]:
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    group = dist.group.WORLD
    assert group is not None
    reducer = Reducer(2, [group])
    buckets = BackwardBuckets(
        list(model.named_parameters()),
        sparse=set(),
        limits=BucketLimits(),
        group=group,
        find_unused=False,
        on_bucket=lambda i, last, buffer: reducer.reduce(Bucket(i, buffer)),
    )
    results = []
    for _ in range(2):
        model.zero_grad()
        buckets.before_forward()
        output = model(torch.full((1, 3), float(dist.get_rank() + 1)))
        buckets.after_forward([])
        output.sum().backward()
        assert model.weight.grad is not None
        results.append(model.weight.grad.clone())
    # a backward without before_forward stays local
    model.zero_grad()
    model(torch.full((1, 3), float(dist.get_rank() + 1))).sum().backward()
    results.append(model.weight.grad.clone())
    return [float(r.mean()) for r in results]


def test_announced_backwards_are_reduced_and_others_are_not() -> None:
    assert run_workers(gradients_are_reduced) == [[1.5, 1.5, 1.0], [1.5, 1.5, 2.0]]


def coded_buckets() -> list[Any]:
    """For each bucket, its codable parameters, and whether its values are theirs in order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 4))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    group = dist.group.WORLD
    assert group is not None
    parameters, x = dict(model.named_parameters()), torch.randn(2, 2, 3, 3)
    local = dict(
        zip(parameters, torch.autograd.grad(model(x).sum(), [*parameters.values()]), strict=True)
    )
    seen: list[Any] = []

    def on_bucket(index: int, is_last: bool, buffer: torch.Tensor) -> Any:
        parts = buckets.coded[index]
        like = [parameters[name] for name, _ in parts]
        right = parts and torch.equal(buffer, flat_of([local[name] for name, _ in parts], like))
        seen.append(([name for name, _ in parts], bool(right)))
        future: Any = torch.futures.Future()
        future.set_result(buffer)
        return future

    buckets = BackwardBuckets(
        list(model.named_parameters()),
        sparse=set(),
        limits=BucketLimits(bytes=300, first_bytes=1),
        group=group,
        find_unused=False,
        on_bucket=on_bucket,
        coded={name for name, p in parameters.items() if p.ndim > 1},
    )
    for _ in range(3):
        model.zero_grad()
        assert not buckets.before_forward()
        output = model(x)
        buckets.after_forward([])
        output.sum().backward()
    return seen


def test_codable_buckets_are_known_and_stable() -> None:
    two, one = (["3.weight", "2.weight"], True), (["0.weight"], True)
    biases = ([], False)
    for seen in run_workers(coded_buckets):
        assert seen == [biases, two, biases, one] * 3


def reducer_is_freed() -> bool:
    import gc
    import weakref

    import fleetlight as fleet
    from fleetlight.fleet.job import current

    model = fleet.distributed_model(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    replica = current().models[0].replica
    assert replica is not None
    alive = weakref.ref(replica._buckets._reducer)
    del replica
    fleet.stop_worker()
    gc.collect()
    return alive() is None


def test_the_reducer_is_freed_when_the_job_is_left() -> None:
    # otherwise gloo's threads outlive Python's objects, and the process aborts or hangs at exit
    assert run_workers(reducer_is_freed) == [True, True]
