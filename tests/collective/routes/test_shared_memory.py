# SPDX-License-Identifier: Apache-2.0
"""Sums in shared memory, and through main memory: correct and equal on all workers."""

import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.futures import Future

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.reduction import reducer as reducing
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket, Staged
from fleetlight.collective.routes.shared_memory import SharedMemory, SharedMemoryError
from fleetlight.collective.stamp import BLANK, GradientStamp, Position
from fleetlight.errors import DivergedError
from fleetlight.wire.descriptors import bound_waits


def mesh(size: int, deadline_s: float = 20.0) -> list[SharedMemory]:
    """Connects workers in one process as those of several processes are."""
    ends: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
    for i in range(size):
        for j in range(i):
            ends[i][j], ends[j][i] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for row in ends:
        for end in filter(None, row):
            bound_waits(end, deadline_s)
    return [SharedMemory(i, row) for i, row in enumerate(ends)]


def together(workers: list[SharedMemory], rounds: list[list[list[torch.Tensor]]]) -> None:
    """All workers sum their tensors of each round concurrently: rounds[worker][round]."""
    errors: list[BaseException] = []

    def run(worker: SharedMemory, mine: list[list[torch.Tensor]]) -> None:
        try:
            for tensors in mine:
                futures = [worker.start(Bucket(i, tensor)) for i, tensor in enumerate(tensors)]
                worker.finish()
                assert all(future.done() for future in futures)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=pair) for pair in zip(workers, rounds, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for worker in workers:
        worker.close()
    if errors:
        raise errors[0]


dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
layouts = st.lists(st.tuples(st.integers(0, 300), dtypes), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.lists(layouts, min_size=1, max_size=3), st.integers(0, 99))
def test_sums_are_correct_and_equal(
    size: int, rounds: list[list[tuple[int, torch.dtype]]], seed: int
) -> None:
    torch.manual_seed(seed)
    mine = [
        [[torch.randint(-8, 8, (n,)).to(dtype) for n, dtype in layout] for layout in rounds]
        for _ in range(size)
    ]
    # small whole numbers, so that the order of additions does not matter
    expected = [
        [torch.stack([mine[w][r][t] for w in range(size)]).sum(0) for t in range(len(layout))]
        for r, layout in enumerate(rounds)
    ]
    together(mesh(size), mine)
    for worker in mine:
        for got, wanted in zip(worker, expected, strict=True):
            for tensor, total in zip(got, wanted, strict=True):
                assert torch.equal(tensor, total.to(tensor.dtype))


@pytest.mark.parametrize("size", [2, 3])
def test_floats_are_bit_identical_on_all_workers(size: int) -> None:
    mine = [[[torch.randn(1000, 3)] for _ in range(4)] for _ in range(size)]
    together(mesh(size), mine)
    for worker in mine[1:]:
        for got, first in zip(worker, mine[0], strict=True):
            assert torch.equal(got[0], first[0])


@pytest.mark.parametrize("size", [2, 3])
def test_an_arena_grows_during_a_round(size: int) -> None:
    mebi = 1 << 18  # floats in a MiB
    sizes = [1000, mebi // 2, 4 * mebi, 7]
    mine = [[[torch.full((n,), w + 1.0) for n in sizes] for _ in range(3)] for w in range(size)]
    together(mesh(size), mine)
    total = size * (size + 1) / 2
    assert all(bool((t == total).all()) for worker in mine for r in worker for t in r)


def test_different_tensors_are_an_error() -> None:
    with pytest.raises(DivergedError, match=r"reduces 1 tensor of \d+ bytes in round 0, this"):
        together(mesh(2), [[[torch.ones(3)]], [[torch.ones(4)]]])


@pytest.mark.parametrize("size", [2, 3])
def test_stamps_travel_with_the_sums(size: int) -> None:
    workers = mesh(size)
    stamps = {i: GradientStamp(Position(1, 10 * i), i) for i in range(size)}
    for worker, stamp in zip(workers, stamps.values(), strict=True):
        worker.start(Bucket(0, torch.ones(3)), stamp)
    threads = [threading.Thread(target=worker.finish) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [worker.stamps() for worker in workers] == [stamps] * size
    for worker in workers:
        worker.close()


def test_a_dead_peer_is_noticed_at_once() -> None:
    one, other = mesh(2)
    other.close()
    tensor = torch.ones(3)
    future = one.start(Bucket(0, tensor))
    with pytest.raises(SharedMemoryError, match="worker 1"):
        one.finish()
    assert future.done()
    one.close()


def test_a_late_peer_is_named_at_the_deadline() -> None:
    one, other = mesh(2, deadline_s=0.2)
    one.start(Bucket(0, torch.ones(3)))
    with pytest.raises(SharedMemoryError, match="timed out waiting for worker 1"):
        one.finish()
    one.close()
    other.close()


def test_no_file_descriptor_leaks() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        mine: Any = [[[torch.ones(1 << 19)] for _ in range(3)] for _ in range(3)]
        together(mesh(3), mine)

    once()
    before = descriptors()
    for _ in range(5):
        once()
    assert descriptors() <= before


# Staging through main memory: sums return to the buffer of the values.


class Doubling:
    """A route that doubles buckets in finish()."""

    def __init__(self) -> None:
        self.started: list[tuple[Bucket, Future[Any]]] = []

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        self.started.append((bucket, Future()))
        return self.started[-1][1]

    def finish(self) -> None:
        for bucket, future in self.started:
            bucket.buffer.mul_(2)
            future.set_result(bucket.buffer)

    def stamps(self) -> Mapping[int, GradientStamp]:
        return {0: BLANK}

    def close(self) -> None:
        self.started.clear()


PARTS = (ParameterSlice("a", 3),)


def test_the_sum_returns_to_the_buffer() -> None:
    route = Doubling()
    staged, buffer = Staged(route), torch.ones(3)
    future = staged.start(Bucket(7, buffer, PARTS, True), BLANK)
    [(sent, _)] = route.started
    assert (sent.index, sent.parts, sent.is_exact) == (7, PARTS, True)
    assert sent.buffer.data_ptr() != buffer.data_ptr()
    assert not future.done()
    staged.finish()
    assert future.value() is buffer
    assert buffer.tolist() == [2.0] * 3
    assert staged.stamps() == {0: BLANK}
    staged.close()
    assert not route.started


def test_only_codable_buckets_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducing, "in_main_memory", lambda tensor: False)
    route = Doubling()
    reducer = Reducer(2, [], route=route)
    coded, plain = torch.ones(3), torch.ones(3)
    future = reducer.reduce(Bucket(0, coded, PARTS))
    # process groups reduce tensors on a GPU; there are none here
    with pytest.raises(ZeroDivisionError):
        reducer.reduce(Bucket(1, plain))
    reducer.finish()
    # halved, then doubled
    assert future.wait().tolist() == [1.0] * 3
    assert [bucket.parts for bucket, _ in route.started] == [PARTS]
