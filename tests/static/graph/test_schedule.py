# SPDX-License-Identifier: Apache-2.0
"""The state of a schedule, and how it changes the loss scale."""

import pytest
import torch

from fleetlight.static.graph.schedule import (
    GROWTH,
    MERGED,
    SCALE,
    Schedule,
    load_scaler_state,
    scaler_state,
    scaling_slots,
)
from fleetlight.static.graph.state import Slot

INF = float("inf")


def gradient(value: float, kind: torch.dtype = torch.float32) -> Slot:
    return Slot("gradient", str(kind), torch.full((2,), value, dtype=kind))


def test_a_plain_schedule_steps_in_each_run() -> None:
    plain = Schedule()
    assert plain.is_plain
    assert plain.slots() == []
    assert [plain.count_backward([]), plain.unscale([])] == [True, True]


def test_the_last_of_k_backwards_steps_and_clears_the_sums() -> None:
    schedule = Schedule(merges=3)
    state = [*schedule.slots(), gradient(5.0), gradient(5.0, torch.float64)]
    assert not schedule.is_plain
    assert [schedule.count_backward(state) for _ in range(3)] == [False, False, True]
    schedule.restart(state)
    assert [float(slot.tensor.sum()) for slot in state] == [0, 0, 0]
    assert state[0].name == MERGED
    assert not schedule.count_backward(state)


@pytest.mark.parametrize("interval", [2, 1 << 30])
def test_the_loss_scale_follows_grad_scaler(interval: int) -> None:
    """The scale grows after some finite steps and shrinks at an overflow, which skips the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=interval)
    schedule = Schedule(growth_interval=interval)
    scaling = scaling_slots(8.0, torch.device("cpu"))
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for value in (8.0, 8.0, INF, 8.0, float("nan"), 4.0, 4.0):
        state = [*scaling, gradient(value)]
        parameter.data.zero_()
        parameter.grad = scaler.scale(torch.ones(())) * 0 + torch.full((2,), value)
        scaler.step(optimizer)
        scaler.update()
        assert schedule.unscale(state) == bool(parameter.any())
        if parameter.any():
            assert torch.equal(state[-1].tensor, -parameter)
        kept = scaler.state_dict()
        assert scaler_state(state) == {name: kept[name] for name in ("scale", "_growth_tracker")}


def test_one_infinite_gradient_skips_the_whole_step() -> None:
    state = [*scaling_slots(4.0, torch.device("cpu")), gradient(4.0), gradient(INF, torch.float64)]
    assert not Schedule(growth_interval=9).unscale(state)


def test_the_loss_scale_can_be_saved_and_loaded() -> None:
    old, new = (scaling_slots(first, torch.device("cpu")) for first in (4.0, 64.0))
    old[1].tensor.fill_(7)
    load_scaler_state(new, scaler_state(old))
    assert [(slot.name, float(slot.tensor)) for slot in new] == [(SCALE, 4.0), (GROWTH, 7.0)]
    load_scaler_state(new, None)
    assert scaler_state(new) == scaler_state(old)
    assert scaler_state(Schedule(merges=2).slots()) is None
