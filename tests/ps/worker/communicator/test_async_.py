# SPDX-License-Identifier: Apache-2.0
"""LocalDense: dense parameters that workers step themselves, on servers and on a worker."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ps.serving import plan

from fleetlight.ps.placement import Placement
from fleetlight.ps.plan import DensePlan
from fleetlight.ps.worker.communicator.async_ import LocalDense
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.reply_values import ReplyValues

WORKERS = 3
PLANS = {
    dtype: plan("async", WORKERS, dense=[DensePlan("weight", (2,), dtype, 0, 0)])
    for dtype in ("float32", "float64")
}
# kernels handle float32, torch the others
every_dtype = pytest.mark.parametrize("dtype", PLANS)


class Server:
    """Adds a share and replies with the sum."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.values = np.ones(2, dtype)

    def add(self, shares: dict[int, Any]) -> ReplyValues:
        for share in shares.get(0, []):
            self.values = self.values + share
        return ReplyValues(dense={0: [self.values.copy()]})


class Worker:
    """A worker that receives its replies in order, when the test says so."""

    def __init__(self, server: Server) -> None:
        self.weight = torch.ones(2, dtype=getattr(torch, server.dtype))
        of = PLANS[server.dtype]
        client: Any = types.SimpleNamespace(
            active=WORKERS, server_num=1, plan=of, placement=Placement(of)
        )
        self.server, self.dense = server, LocalDense(client, LocalParameters([self.weight]))
        self.dense.begin()
        self.replies: deque[ReplyValues] = deque()

    def push(self, *, just_taken: bool = False) -> None:
        self.replies.append(self.server.add(self.dense.share(0, just_taken=just_taken)))

    def receive(self, count: int = 1) -> None:
        for _ in range(count - 1):
            self.replies.popleft()
        self.dense.take(self.replies.popleft(), count)


@every_dtype
def test_own_progress_counts_in_full_until_its_reply(dtype: str) -> None:
    server = Server(dtype)
    first, second = Worker(server), Worker(server)
    first.weight += 3
    first.push()
    assert first.weight.tolist() == [4, 4]
    second.weight += 6
    second.push()
    first.weight += 1
    first.receive()
    # the mean of all progress up to its push, and its own progress since
    assert first.weight.tolist() == [1 + 3 / 3 + 1] * 2
    second.receive()
    assert second.weight.tolist() == [1 + 3 / 3 + 6 / 3] * 2


@every_dtype
def test_pushes_without_a_reply_stay_on_top_of_server_values(dtype: str) -> None:
    worker = Worker(Server(dtype))
    for learned in (3, 6, 9):
        worker.weight += learned
        worker.push()
    worker.receive(2)
    assert worker.weight.tolist() == [1 + (3 + 6) / 3 + 9] * 2
    worker.receive()
    assert worker.weight.tolist() == [1 + (3 + 6 + 9) / 3] * 2


@every_dtype
def test_a_share_is_written_in_the_memory_of_its_server(dtype: str) -> None:
    worker, memory = Worker(Server(dtype)), np.zeros(2, dtype)
    worker.weight += 3
    shares = worker.dense.share(0, memory=[lambda shape, dtype: memory])
    assert np.may_share_memory(shares[0][0], memory)
    assert memory.tolist() == [1, 1]


@every_dtype
def test_a_skipped_push_adds_nothing(dtype: str) -> None:
    worker = Worker(Server(dtype))
    worker.dense.skipped()
    worker.replies.append(worker.server.add({}))
    worker.weight += 3
    worker.push()
    worker.receive()
    assert worker.weight.tolist() == [4, 4]


@every_dtype
@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), st.sampled_from("lphb")), max_size=60))
def test_all_workers_converge_to_the_mean_of_all_progress(
    dtype: str, operations: list[tuple[int, str]]
) -> None:
    server = Server(dtype)
    workers, learned = [Worker(server) for _ in range(WORKERS)], 0
    for number, operation in operations:
        worker = workers[number]
        if operation == "l":
            worker.weight += number + 1
            learned += number + 1
        elif operation == "p":
            worker.push()
        elif worker.replies:
            worker.receive()
            if operation == "b":
                worker.push(just_taken=True)
    for worker in workers:
        worker.push()
    for worker in workers:
        worker.receive(len(worker.replies))
    np.testing.assert_allclose(server.values, 1 + learned / WORKERS, rtol=1e-5)
    last = workers[-1]
    np.testing.assert_allclose(last.weight.numpy(), server.values, rtol=1e-5)
