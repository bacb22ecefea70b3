# SPDX-License-Identifier: Apache-2.0
"""Lookups on a device equal those in main memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.layers.devices import as_on_a_gpu
from tests.ps.layers.pooled import Pooled
from tests.ps.rows import DIM, ROWS, Kept, dense, handle
from tests.served import Member, Net, batches, loss_of, run
from torch import Tensor, nn

from fleetlight import static
from fleetlight.kernels import dedup
from fleetlight.ps.layers.device_rows import ArrivingGradients, TableRows
from fleetlight.ps.layers.handle import Visit
from fleetlight.ps.layers.lookup import embed, embed_bags
from fleetlight.ps.update import TableGradients


def both(call: Any) -> tuple[Any, Any]:
    """The result of a call in main memory, and as on a GPU."""
    here = call()
    with pytest.MonkeyPatch.context() as patch:
        late = as_on_a_gpu(patch)
        there = call()
    assert late.started, "the call did not take the path of a GPU"
    return here, there


def visit(ids: Any) -> Visit:
    return handle(Kept()).visit(np.asarray(ids, np.int64), True)


def pull(out: Tensor) -> None:
    """Backward with a gradient that differs in each element."""
    out.backward(torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype))


IDS = st.lists(st.integers(0, ROWS - 1), max_size=9)


@settings(max_examples=40)
@given(IDS, st.sampled_from([torch.float32, torch.float64]))
def test_rows_and_gradients_equal_those_of_kernels(ids: list[int], dtype: torch.dtype) -> None:
    def call() -> tuple[Tensor, Tensor]:
        table = nn.Parameter(torch.empty(0, DIM, dtype=dtype))
        out = embed(table, visit(ids), None, None)
        pull(out)
        return out.detach(), dense(table)

    here, there = both(call)
    torch.testing.assert_close(there, here)


@settings(max_examples=60)
@given(st.lists(IDS, max_size=4), st.sampled_from(["sum", "mean", "max", "weighted"]))
def test_bags_equal_those_of_kernels(bags: list[list[int]], mode: Any) -> None:
    ids = [one for bag in bags for one in bag]
    bounds = np.cumsum([0, *map(len, bags)])

    def call() -> tuple[Any, ...]:
        table = nn.Parameter(torch.empty(0, DIM))
        weights = torch.linspace(0.5, 2, len(ids)).requires_grad_() if mode == "weighted" else None
        combiner = "sum" if mode == "weighted" else mode
        out = embed_bags(table, weights, visit(ids), bounds, combiner, None)
        pull(out)
        each = None if weights is None or not ids else weights.grad
        return out.detach(), dense(table), each

    here, there = both(call)
    torch.testing.assert_close(there[:2], here[:2])
    if here[2] is not None:
        torch.testing.assert_close(there[2], here[2])


def test_sums_are_made_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    table = nn.Parameter(torch.empty(0, DIM, dtype=torch.float16))
    out = embed(table, visit([1] * 3000), None, None)
    assert out.dtype == torch.float16
    out.backward(torch.ones_like(out))
    # in float16, 2048 + 1 is 2048
    assert dense(table)[1].tolist() == [3000.0] * DIM


def test_reading_gradients_of_a_table_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    late = as_on_a_gpu(monkeypatch)
    table = nn.Parameter(torch.empty(0, DIM))
    counts = np.array([2.0, 1.0], np.float32), np.array([1.0, 0.0], np.float32)
    embed(table, visit([3, 1]), counts, None).sum().backward()
    assert (late.started, late.arrived) == (1, 0)
    gradient: Any = table.grad
    [part] = gradient.parts
    assert part.shows.tolist() == [2, 1]
    part.gradients *= 2
    assert part.gradients.tolist() == [[2.0] * DIM] * 2
    assert late.arrived == 1


def test_rows_that_do_not_learn_have_no_gradient() -> None:
    wanted = dedup([4, 5, 6], 2)
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    trained = wanted.ids != 5
    found = TableRows(Visit(wanted, rows), None, trained).part(lambda: torch.from_numpy(rows))
    assert type(found) is TableGradients
    assert found.ids.tolist() == wanted.ids[trained].tolist()
    assert found.gradients.tolist() == rows[trained].tolist()
    whole = TableRows(Visit(wanted, rows), None).part(lambda: torch.from_numpy(rows))
    assert type(whole) is ArrivingGradients


@pytest.mark.slow
def test_training_with_servers_equals_that_in_main_memory() -> None:
    ids, targets = batches(6, 2, ids=30)

    def train(worker: Member) -> Any:
        for t in range(len(ids)):
            worker.optimizer.zero_grad()
            loss_of(worker.model, ids[t, worker.index], targets[t, worker.index]).backward()
            worker.optimizer.step()
        worker.barrier()
        model: Any = worker.model
        return torch.from_numpy(worker.rows(range(30))), model.linear.weight.detach().clone()

    def build() -> Any:
        model = Net()
        return model, [torch.optim.Adagrad(model.parameters(), lr=0.1)]

    here, there = both(lambda: run(build, train, servers=2))
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_programs_with_servers_equal_those_in_main_memory() -> None:
    ids, targets = batches(4, 1, ids=30)

    def train(worker: Member) -> Any:
        inputs = {"ids": ids[0, 0], "target": targets[0, 0]}
        program = static.capture(worker.model, nn.functional.mse_loss, worker.optimizer, inputs)
        exe = static.Executor()
        for step in range(len(ids)):
            exe.run(program, {"ids": ids[step, 0], "target": targets[step, 0]}, ["loss"])
        model: Any = worker.model
        return torch.from_numpy(worker.rows(range(30))), model.linear.weight.detach().clone()

    def build() -> Any:
        model = Net(padding_idx=2)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    here, there = both(lambda: run(build, train, workers=1))
    torch.testing.assert_close(there, here)


@pytest.mark.slow
@pytest.mark.parametrize("combiner", ["mean", "sum", "max"])
def test_bags_of_programs_equal_those_in_main_memory(combiner: Any) -> None:
    ids, targets = batches(4, 1, ids=30)
    weights = torch.linspace(0.5, 2, ids[0, 0].numel()).view(ids[0, 0].shape)

    def train(worker: Member) -> Any:
        given = {"weights": weights} if combiner == "sum" else {}
        inputs = {"ids": ids[0, 0], **given, "target": targets[0, 0]}
        program = static.capture(worker.model, nn.functional.mse_loss, worker.optimizer, inputs)
        exe = static.Executor()
        for step in range(len(ids)):
            exe.run(program, {**inputs, "ids": ids[step, 0], "target": targets[step, 0]}, ["loss"])
        model: Any = worker.model
        return torch.from_numpy(worker.rows(range(30))), model.linear.weight.detach().clone()

    def build() -> Any:
        model = Pooled(combiner)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    here, there = both(lambda: run(build, train, workers=1))
    torch.testing.assert_close(there, here)
