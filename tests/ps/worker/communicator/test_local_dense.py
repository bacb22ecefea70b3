# SPDX-License-Identifier: Apache-2.0
"""Dense parameters that workers step themselves: what the servers hold, and what a worker sees."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ps.serving import plan

from fleetlight.ps.placement import Placement
from fleetlight.ps.plan import DensePlan
from fleetlight.ps.worker.client import ReplyValues
from fleetlight.ps.worker.communicator.local_dense import LocalDense
from fleetlight.ps.worker.local_parameters import LocalParameters

WORKERS = 3
PLAN = plan("async", WORKERS, dense=[DensePlan("weight", (2,), "float64", 0, 0)])


class Server:
    """Adds, and answers what is there then."""

    def __init__(self) -> None:
        self.values = np.ones(2)

    def add(self, shares: dict[int, Any]) -> ReplyValues:
        for share in shares.get(0, []):
            self.values = self.values + share
        return ReplyValues(dense={0: [self.values.copy()]})


class Worker:
    """Its pushes are answered in order, whenever the test says so."""

    def __init__(self, server: Server) -> None:
        self.weight = torch.ones(2, dtype=torch.float64)
        client: Any = types.SimpleNamespace(
            worker_num=WORKERS, server_num=1, plan=PLAN, placement=Placement(PLAN)
        )
        self.server, self.dense = server, LocalDense(client, LocalParameters([self.weight]))
        self.dense.begin()
        self.answers: deque[ReplyValues] = deque()

    def push(self, *, just_taken: bool = False) -> None:
        self.answers.append(self.server.add(self.dense.share(0, just_taken=just_taken)))

    def hear(self, count: int = 1) -> None:
        for _ in range(count - 1):
            self.answers.popleft()
        self.dense.take(self.answers.popleft(), count)


def test_own_progress_counts_as_a_whole_until_it_is_answered() -> None:
    server = Server()
    one, other = Worker(server), Worker(server)
    one.weight += 3
    one.push()
    assert one.weight.tolist() == [4, 4]
    other.weight += 6
    other.push()
    one.weight += 1
    one.hear()
    # the mean of what all have learned up to its push, and what it has learned since
    assert one.weight.tolist() == [1 + 3 / 3 + 1] * 2
    other.hear()
    assert other.weight.tolist() == [1 + 3 / 3 + 6 / 3] * 2


def test_of_several_pushes_under_way_those_without_an_answer_stay_on_top() -> None:
    worker = Worker(Server())
    for learned in (3, 6, 9):
        worker.weight += learned
        worker.push()
    worker.hear(2)
    assert worker.weight.tolist() == [1 + (3 + 6) / 3 + 9] * 2
    worker.hear()
    assert worker.weight.tolist() == [1 + (3 + 6 + 9) / 3] * 2


def test_a_skipped_push_brings_nothing() -> None:
    worker = Worker(Server())
    worker.dense.skipped()
    worker.answers.append(worker.server.add({}))
    worker.weight += 3
    worker.push()
    worker.hear()
    assert worker.weight.tolist() == [4, 4]


@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), st.sampled_from("lphb")), max_size=60))
def test_in_the_end_all_have_the_mean_of_what_all_have_learned(acts: list[tuple[int, str]]) -> None:
    server = Server()
    workers, learned = [Worker(server) for _ in range(WORKERS)], 0
    for number, act in acts:
        worker = workers[number]
        if act == "l":
            worker.weight += number + 1
            learned += number + 1
        elif act == "p":
            worker.push()
        elif worker.answers:
            worker.hear()
            if act == "b":
                worker.push(just_taken=True)
    for worker in workers:
        worker.push()
    for worker in workers:
        worker.hear(len(worker.answers))
    np.testing.assert_allclose(server.values, 1 + learned / WORKERS)
    last = workers[-1]
    np.testing.assert_allclose(last.weight.numpy(), server.values)
