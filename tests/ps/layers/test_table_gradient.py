# SPDX-License-Identifier: Apache-2.0
"""Gradients of tables: merged, on devices, and staged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from fleetlight.errors import PlanError
from fleetlight.kernels import dedup
from fleetlight.ps.layers import staging
from fleetlight.ps.layers.device_rows import ArrivingGradients, TableRows
from fleetlight.ps.layers.handle import Visit
from fleetlight.ps.layers.lookup import embed, embed_bags
from fleetlight.ps.layers.staging import BlockingStaging, CudaStaging, staging_of
from fleetlight.ps.layers.table_gradient import TableGradient, merge
from fleetlight.ps.update import TableGradients

# The gradient of a table works with torch's operations on gradients.


def part(ids: list[int], values: list[float], counted: bool = False) -> TableGradients:
    grads = np.repeat(np.array(values, np.float32)[:, None], 2, axis=1)
    counts = np.ones(len(ids), np.float32) if counted else None
    return TableGradients(np.array(ids, np.int64), np.array([0, len(ids)]), grads, counts, counts)


def gradient(*parts: TableGradients) -> TableGradient:
    return TableGradient(torch.empty(0, 2), list(parts))


def weight(*parts: TableGradients) -> nn.Parameter:
    made = nn.Parameter(torch.empty(0, 2))
    made.grad = gradient(*parts)
    return made


def values_of(of: Any) -> dict[int, float]:
    merged = of.merged(1)
    if merged is None:
        return {}
    return {int(i): float(g[0]) for i, g in zip(merged.ids, merged.gradients, strict=True)}


def test_merge_sums_the_rows_of_all_parts() -> None:
    both = gradient(part([1, 2], [1, 2]), part([], []), part([2, 9], [10, 20]))
    assert values_of(both) == {1: 1, 2: 12, 9: 20}
    assert gradient().merged(1) is None
    one = part([1], [1])
    assert gradient(one).merged(1) is one
    assert repr(both) == "TableGradient(4 rows)"


def test_merge_sums_counts_if_all_parts_have_them() -> None:
    counted = merge([part([1, 2], [1, 1], True), part([2], [1], True)], 1)
    assert counted.shows is not None
    assert dict(zip(counted.ids.tolist(), counted.shows.tolist(), strict=True)) == {1: 1, 2: 2}
    assert merge([part([1], [1], True), part([2], [1])], 1).shows is None


def test_merge_groups_ids_by_server() -> None:
    merged = merge([part([*range(20)], [1.0] * 20), part([3], [1.0])], 3)
    assert merged.starts[-1] == len(merged.ids) == 20
    assert len(merged.starts) == 4


def test_autograd_accumulates_table_gradients() -> None:
    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any, number: int) -> Any:
            ctx.number = number
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return gradient(part([ctx.number], [1.0])), None

    made: Any = nn.Parameter(torch.empty(0, 2))
    for number in (1, 2, 1):
        Lookup.apply(made, number).backward()  # type: ignore[no-untyped-call]
    # twice in one graph
    (Lookup.apply(made, 5) + Lookup.apply(made, 5)).backward()  # type: ignore[no-untyped-call]
    assert values_of(made.grad) == {1: 2, 2: 1, 5: 2}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_zero_grad_clears_a_table_gradient(set_to_none: bool, foreach: bool) -> None:
    made = weight(part([1], [1]))
    dense = nn.Parameter(torch.ones(2))
    dense.grad = torch.ones(2)
    torch.optim.SGD([made, dense], 0.1, foreach=foreach).zero_grad(set_to_none)
    assert made.grad is None or values_of(made.grad) == {}
    assert dense.grad is None or not dense.grad.any()


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_includes_table_gradients(norm_type: float, foreach: bool | None) -> None:
    made, dense = weight(part([1, 2], [3, -1]), part([1], [1])), nn.Parameter(torch.ones(2))
    dense.grad = torch.tensor([5.0, -2.0])
    values = torch.tensor([4.0, 4.0, -1.0, -1.0, 5.0, -2.0])
    total = torch.nn.utils.clip_grad_norm_([made, dense], 1.0, norm_type, foreach=foreach)
    expected = torch.linalg.vector_norm(values, norm_type)
    torch.testing.assert_close(total, expected)
    factor = float(1 / (expected + 1e-6))
    assert values_of(made.grad) == pytest.approx({1: 4 * factor, 2: -factor})
    torch.testing.assert_close(dense.grad, torch.tensor([5.0, -2.0]) * factor)


@pytest.mark.parametrize(("value", "infinite"), [(8.0, False), (float("inf"), True)])
def test_grad_scaler_unscales_and_finds_infinities(value: float, infinite: bool) -> None:
    made, dense = weight(part([1], [value])), nn.Parameter(torch.ones(1))
    dense.grad = torch.ones(1) * 8
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD([made, dense], 0.1)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    assert values_of(made.grad) == {1: value / 4}
    assert float(dense.grad) == 2
    state: Any = scaler._per_optimizer_states[id(optimizer)]
    assert bool(state["found_inf_per_device"][torch.device("cpu")]) is infinite


def test_arithmetic_on_table_gradients() -> None:
    one = gradient(part([1], [2.0]))
    copy = one.clone()
    assert values_of(one * 3) == {1: 6}
    one.mul_(2)
    one.div_(4)
    assert (values_of(one), values_of(copy)) == ({1: 1}, {1: 2})
    assert values_of(one + copy) == {1: 3}
    one.add_(copy)
    assert values_of(one) == {1: 3}
    assert values_of(one.detach()) == {1: 3}
    assert gradient(part([1], [float("nan")])).is_finite() is False


def test_operations_that_need_all_rows_are_refused() -> None:
    with pytest.raises(PlanError, match="whose rows are on the servers; supported are"):
        gradient(part([1], [1])).sqrt()


# Lookups on a device equal those in main memory.


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
        return trained_values(worker)

    def build() -> Any:
        model = Net()
        return model, [torch.optim.Adagrad(model.parameters(), lr=0.1)]

    here, there = both(lambda: run(build, train, servers=2))
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-7)


def train_by_program(worker: Member, inputs: dict[str, Any], ids: Any, targets: Any) -> Any:
    program = static.capture(worker.model, nn.functional.mse_loss, worker.optimizer, inputs)
    exe = static.Executor()
    for step in range(len(ids)):
        exe.run(program, {**inputs, "ids": ids[step, 0], "target": targets[step, 0]}, ["loss"])
    return trained_values(worker)


def trained_values(worker: Member) -> Any:
    model: Any = worker.model
    return torch.from_numpy(worker.rows(range(30))), model.linear.weight.detach().clone()


@pytest.mark.slow
def test_programs_with_servers_equal_those_in_main_memory() -> None:
    ids, targets = batches(4, 1, ids=30)

    def train(worker: Member) -> Any:
        inputs = {"ids": ids[0, 0], "target": targets[0, 0]}
        return train_by_program(worker, inputs, ids, targets)

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
        return train_by_program(worker, inputs, ids, targets)

    def build() -> Any:
        model = Pooled(combiner)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    here, there = both(lambda: run(build, train, workers=1))
    torch.testing.assert_close(there, here)


# Copies to and from a device: their values, and on a GPU the order of the queued work.


CPU = torch.device("cpu")


def test_blocking_copies_are_independent_of_their_source() -> None:
    copies, array = BlockingStaging(CPU), np.arange(3, dtype=np.float32)
    array.flags.writeable = False
    there = copies.to_device(array)
    arrival = copies.to_host(there)
    there += 1
    assert arrival().tolist() == [0.0, 1.0, 2.0]
    assert array.tolist() == [0.0, 1.0, 2.0]
    target = torch.zeros(3)
    copies.write(target, there)
    assert target.tolist() == [1.0, 2.0, 3.0]


def test_each_device_has_its_copies() -> None:
    assert staging_of(CPU) is staging_of(CPU)
    assert isinstance(staging_of(CPU), BlockingStaging)


class Stream:
    """Records what is queued on it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Stream:
        self._log.append(f"event in {self.name}")
        return self

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What copies queue on a GPU, whose tensors are in main memory."""
    log: list[str] = []
    names = iter(["in", "out"])
    compute = Stream(log, "compute")

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}:")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(staging, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))

    def keep(tensor: Tensor, stream: Any) -> None:
        log.append(f"memory kept for {stream.name}")

    monkeypatch.setattr(Tensor, "record_stream", keep)
    return log


def test_work_on_the_gpu_waits_for_copied_rows(queued: list[str]) -> None:
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    array.flags.writeable = False
    assert CudaStaging(CPU).to_device(array).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert queued == ["on in:", "compute waits for in", "memory kept for compute"]


def test_the_copy_of_gradients_follows_their_computation(queued: list[str]) -> None:
    arrival = CudaStaging(CPU).to_host(torch.ones(2))
    before = ["out waits for compute", "on out:", "event in out", "memory kept for out"]
    assert queued == before
    assert arrival().tolist() == [1.0, 1.0]
    assert queued == [*before, "host waits for out"]


def test_parameters_are_written_in_the_order_of_the_computation(queued: list[str]) -> None:
    target = torch.zeros(2, dtype=torch.bfloat16)
    CudaStaging(CPU).write(target, torch.ones(2, dtype=torch.bfloat16))
    assert target.tolist() == [1.0, 1.0]
    assert queued == []
