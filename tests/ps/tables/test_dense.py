# SPDX-License-Identifier: Apache-2.0
"""DenseBlocks: steps on servers equal steps in the process of the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.servers import DenseServers
from torch import Tensor, nn

from fleetlight.errors import CheckpointError, PlanError
from fleetlight.optim import Ftrl, Lamb, Lars, RowwiseAdam
from fleetlight.ps.placement import CUT_ABOVE
from fleetlight.ps.plan import ASYNC, GEO
from fleetlight.ps.tables.dense_state import DenseState

Make = Callable[[Any], torch.optim.Optimizer]
STEPS = 7
SHAPES = [(7, 5), (300, 251), (), (5,)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def set_gradients(params: Iterable[nn.Parameter], step: int) -> None:
    """Others at each step; backward does not reach the first one every time."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if number == 0 and step % 3 == 1 else grad


def assert_same(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), number


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.3, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.05)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    # turns the betas as well
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
}


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_adamw_with_groups_and_schedules_equals_plain_torch(servers: int, schedule: str) -> None:
    plain, ours = parameters(), parameters()
    plain_optimizer, our_optimizer = two_groups(plain), two_groups(ours)
    dense = DenseServers(ours, [our_optimizer], servers)
    plain_schedule = SCHEDULERS[schedule](plain_optimizer)
    our_schedule = SCHEDULERS[schedule](our_optimizer)
    our_optimizer.step()  # so that the schedule has seen a step; without gradients it is none
    for step in range(STEPS):
        set_gradients(plain, step)
        set_gradients(ours, step)
        plain_optimizer.step()
        plain_schedule.step()
        dense.step()
        our_schedule.step()
        dense.take()
        assert_same(ours, plain)


class Clipped(torch.optim.Optimizer):
    """A user's own class: by the shape of the parameter, with an argument of its own."""

    def __init__(self, params: Any, limit: float) -> None:
        super().__init__(params, {"lr": 0.1})
        self.limit = limit

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                rows = p.grad.norm(dim=-1, keepdim=True).clamp(max=self.limit)
                p -= group["lr"] * rows * p.grad / self.state[p]["steps"]


OTHERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, torch.tensor(0.01), amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    # whose state exists before the first step
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5, lr_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01, t0=2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "Lars": lambda p: Lars(p, 0.5),
    "Lamb": lambda p: Lamb(p, 0.01),
    "Ftrl": lambda p: Ftrl(p, 0.1, l1=0.01),
    "RowwiseAdam": lambda p: RowwiseAdam(p, 0.01, weight_decay=0.1),
    "own": lambda p: Clipped(p, 0.5),
}


def trained_plainly(make: Make, steps: int) -> list[nn.Parameter]:
    plain = parameters()
    optimizer = make(plain)
    for step in range(steps):
        set_gradients(plain, step)
        optimizer.step()
    return plain


@pytest.mark.parametrize("name", OTHERS)
def test_every_class_equals_plain_torch(name: str) -> None:
    ours = parameters()
    dense = DenseServers(ours, [OTHERS[name](ours)], 2)
    for step in range(4):
        set_gradients(ours, step)
        dense.step()
    dense.take()
    assert_same(ours, trained_plainly(OTHERS[name], 4))


def test_only_elementwise_rules_split_parameters() -> None:
    for name, cut in (("SGD", True), ("Adafactor", False), ("Lars", False)):
        params = parameters()
        assert params[1].numel() > CUT_ABOVE
        dense = DenseServers(params, [OTHERS[name](params)], 2)
        holders = [
            server
            for server in range(2)
            for block in dense.placement.blocks_of(server)
            if any(piece.parameter == 1 for piece in block.pieces)
        ]
        assert len(holders) == (2 if cut else 1)


def test_optimizers_step_independently() -> None:
    params = parameters()
    both = [torch.optim.SGD(params[:2], 1.0), torch.optim.SGD(params[2:], 1.0)]
    dense = DenseServers(params, both, 2)
    before = copy.deepcopy(params)
    set_gradients(params, 0)
    dense.step(1)
    dense.take()
    assert_same(params[:2], before[:2])
    assert torch.equal(params[3], before[3] - params[3].grad)


def test_bfloat16_keeps_its_bits() -> None:
    plain, ours = parameters(torch.bfloat16), parameters(torch.bfloat16)
    dense = DenseServers(ours, [torch.optim.SGD(ours, 0.1, momentum=0.9)], 2)
    optimizer = torch.optim.SGD(plain, 0.1, momentum=0.9)
    for step in range(3):
        set_gradients(plain, step)
        set_gradients(ours, step)
        optimizer.step()
        dense.step()
    dense.take()
    assert_same(ours, plain)


def test_hooks_of_the_users_optimizer_stay_with_it() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, 1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    told: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: told.append("stepped"))
    dense = DenseServers(params, [optimizer], 1)
    before = copy.deepcopy(params)
    set_gradients(params, 0)
    dense.step()
    assert not told
    assert_same(params, before)


def test_sent_values_do_not_change_later() -> None:
    params = parameters()
    dense = DenseServers(params, [torch.optim.SGD(params, 1.0)], 1)
    (server,) = dense.servers
    sent = server.values()[0]
    kept = sent.copy()
    assert server.values()[0] is sent
    set_gradients(params, 0)
    dense.step()
    assert np.array_equal(sent, kept)
    assert not np.array_equal(server.values()[0], kept)
    with pytest.raises(ValueError, match="read-only"):
        sent[0] = 1


def test_received_gradients_are_not_modified() -> None:
    """Torch must not warn of memory that is read-only."""
    params = parameters()
    dense = DenseServers(params, [torch.optim.SGD(params, 1.0)], 1)
    (server,) = dense.servers
    gradient = np.ones_like(server.values()[0])
    gradient.flags.writeable = False
    before = server.values()[0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            server.step(0, [{"lr": 0.5}], (), [gradient])
        finally:
            torch.set_warn_always(False)
    assert not told
    assert np.array_equal(server.values()[0], before - 0.5)


def test_restoring_discards_later_state() -> None:
    params = parameters()
    dense = DenseServers(params, [torch.optim.Adam(params, 0.1)], 1)
    (server,) = dense.servers
    start = server.state()
    ends = []
    for _ in range(2):
        server.restore(start)
        for step in range(3):
            set_gradients(params, step)
            dense.step()
        ends.append(server.values()[0])
    assert np.array_equal(*ends)


def test_geo_adds_differences_and_keeps_no_state() -> None:
    params = parameters()
    dense = DenseServers(params, [torch.optim.Adam(params, 1.0)], 2, GEO)
    for server in dense.servers:
        before = server.values()
        server.add([np.full_like(array, 2) for array in before])
        assert all(np.array_equal(a + 2, b) for a, b in zip(before, server.values(), strict=True))
        server.fill(before)
        assert all(np.array_equal(a, b) for a, b in zip(before, server.values(), strict=True))
        state = server.state()
        assert (state.state, state.scalars, state.arrays) == ([], [], [])
        server.restore(state)


def test_values_of_another_shape_are_refused() -> None:
    params = parameters()
    dense = DenseServers(params, [torch.optim.SGD(params, 1.0)], 1, ASYNC)
    size = sum(p.numel() for p in params)
    message = rf"server 0: dense values of optimizer 0 are float64\[3\], .* float32\[{size}\]"
    with pytest.raises(PlanError, match=message):
        dense.servers[0].fill([np.zeros(3)])


def test_sparse_adam_takes_no_dense_parameter() -> None:
    params = parameters()
    with pytest.raises(PlanError, match=r"'p0' is in the optimizer torch.optim.*SparseAdam"):
        DenseServers(params, [torch.optim.SparseAdam(params)], 1)


def test_state_for_another_server_is_refused() -> None:
    params = parameters()
    one = DenseServers(params, [torch.optim.Adam(params)], 1).servers[0]
    before = one.values()[0]
    wrong = DenseState([before + 1], [], [{}], [])
    with pytest.raises(CheckpointError, match="dense state has 1 pieces, expected 4"):
        one.restore(wrong)
    assert np.array_equal(one.values()[0], before)
