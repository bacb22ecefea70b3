# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table works with torch's operations on gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleetlight.errors import PlanError
from fleetlight.ps.layers.table_gradient import TableGradient, merge
from fleetlight.ps.update import TableGradients


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
