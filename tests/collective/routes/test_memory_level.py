# SPDX-License-Identifier: Apache-2.0
"""A level in shared memory: the leader gets the sum and passes its result down to all."""

import os
import socket
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.collective.routes.memory_level import MemoryLevel
from fleetlight.collective.routes.shared_memory import SharedMemoryError
from fleetlight.errors import DivergedError
from fleetlight.wire.descriptors import bound_waits

#: indices of the workers of one host when two hosts alternate
INDICES = [1, 3, 5, 7]


def mesh(size: int, deadline_s: float = 20.0) -> list[MemoryLevel]:
    """Connects levels in one process as those of several processes are."""
    indices = INDICES[:size]
    peers: dict[int, dict[int, socket.socket]] = {index: {} for index in indices}
    for i in indices:
        for j in (index for index in indices if index < i):
            peers[i][j], peers[j][i] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for row in peers.values():
        for end in row.values():
            bound_waits(end, deadline_s)
    return [MemoryLevel(index, peers[index]) for index in indices]


def at_once(calls: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if errors:
        raise errors[0]


def work(level: MemoryLevel, rounds: list[list[torch.Tensor]]) -> None:
    """In each round all tensors go up, the leader doubles the sums, and all come down."""
    for tensors in rounds:
        for tensor in tensors:
            total = level.up(tensor)
            if total is not None:
                total.mul_(2)
        for tensor in tensors:
            level.down(tensor)
        level.end_round()


def together(levels: list[MemoryLevel], rounds: list[list[list[torch.Tensor]]]) -> None:
    try:
        at_once(
            [lambda a=a, b=b: work(a, b) for a, b in zip(levels, rounds, strict=True)]  # type: ignore[misc]
        )
    finally:
        for level in levels:
            level.close()


dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8])
layouts = st.lists(st.tuples(st.integers(1, 300), dtypes), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.lists(layouts, min_size=1, max_size=4), st.integers(0, 99))
def test_the_leaders_result_reaches_all_members(
    size: int, rounds: list[list[tuple[int, torch.dtype]]], seed: int
) -> None:
    torch.manual_seed(seed)
    mine = [
        [[torch.randint(0, 8, (n,)).to(dtype) for n, dtype in layout] for layout in rounds]
        for _ in range(size)
    ]
    # small whole numbers, so that the order of additions does not matter
    expected = [
        [2 * torch.stack([mine[w][r][t] for w in range(size)]).sum(0) for t in range(len(layout))]
        for r, layout in enumerate(rounds)
    ]
    together(mesh(size), mine)
    for worker in mine:
        for got, wanted in zip(worker, expected, strict=True):
            for tensor, total in zip(got, wanted, strict=True):
                assert torch.equal(tensor, total.to(tensor.dtype))


def test_floats_are_bit_identical_on_all_workers() -> None:
    mine = [[[torch.randn(1001)] for _ in range(4)] for _ in range(3)]
    together(mesh(3), mine)
    for worker in mine[1:]:
        for got, first in zip(worker, mine[0], strict=True):
            assert torch.equal(got[0], first[0])


def test_arenas_are_added_while_tensors_are_in_flight() -> None:
    mebi = 1 << 18  # floats in a MiB
    layouts = [[1000, mebi // 2, 4 * mebi, 7, mebi], [7, 4 * mebi, 4 * mebi, 4 * mebi], [3]]
    mine = [[[torch.full((n,), w + 1.0) for n in sizes] for sizes in layouts * 2] for w in range(2)]
    together(mesh(2), mine)
    assert all(bool((t == 6).all()) for worker in mine for r in worker for t in r)


def test_different_tensors_are_an_error() -> None:
    message = r"worker \d brings tensor 0, of \d+ bytes, this worker brings tensor 0, of \d+ bytes"
    with pytest.raises(DivergedError, match=message):
        together(mesh(2), [[[torch.ones(3)]], [[torch.ones(4)]]])
    with pytest.raises(DivergedError, match=r"worker \d (brings|takes back) tensor"):
        together(mesh(2), [[[torch.ones(3)]], [[torch.ones(3), torch.ones(3)]]])


def test_a_dead_peer_is_noticed_at_once() -> None:
    one, other = mesh(2)
    other.close()
    with pytest.raises(SharedMemoryError, match="worker 3"):
        one.up(torch.ones(3))
    one.close()


def test_a_late_peer_is_named_at_the_deadline() -> None:
    one, other = mesh(2, deadline_s=0.2)
    with pytest.raises(SharedMemoryError, match="timed out waiting for worker 3"):
        one.up(torch.ones(3))
    one.close()
    other.close()


def test_a_wait_can_be_interrupted_by_another_thread() -> None:
    one, other = mesh(2)
    with pytest.raises(SharedMemoryError, match="worker 3"):
        at_once([lambda: one.up(torch.ones(3)) and None, one.interrupt])
    one.close()
    other.close()


def test_no_file_descriptor_leaks() -> None:
    def once() -> None:
        together(mesh(3), [[[torch.ones(1 << 19)] for _ in range(3)] for _ in range(3)])

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before
