# SPDX-License-Identifier: Apache-2.0
"""Optimizers of servers, and the dense parameters that they step."""

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.errors import refuses
from tests.ps.servers import DenseServers
from torch import Tensor, nn

from fleetlight.errors import CheckpointError, PlanError
from fleetlight.kernels import RULES
from fleetlight.optim import Ftrl, Lamb, Lars, RowwiseAdagrad, RowwiseAdam
from fleetlight.ps.messages import FetchedDense, Message
from fleetlight.ps.placement import CUT_ABOVE
from fleetlight.ps.plan import ASYNC, GEO, RulePlan
from fleetlight.ps.tables.dense_state import ELEMENTS, ODD, DenseState, PieceState, part, whole
from fleetlight.ps.tables.optimizers import (
    PushOptions,
    layer_rules,
    optimizer_plan,
    own_rule,
    push_options,
    rule_of,
    rule_options,
)

# The servers' plans are derived from the user's optimizers; unsupported ones are refused.


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]


def rule(kind: Any, **options: Any) -> RulePlan:
    optimizer = kind(weights(), lr=0.1, **options)
    return rule_of(optimizer, optimizer.param_groups[0], "emb")


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {}, RulePlan("sgd", {})),
        (torch.optim.SGD, {"weight_decay": 0.1, "fused": True}, RulePlan("sgd", {})),
        (torch.optim.SGD, {"momentum": 0.9}, RulePlan("momentum", {"nesterov": 0.0})),
        (
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True},
            RulePlan("momentum", {"nesterov": 1.0}),
        ),
        (
            torch.optim.Adagrad,
            {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
            RulePlan("adagrad", {"initial_accumulator_value": 0.5}),
        ),
        (torch.optim.Adam, {"betas": (0.5, 0.9)}, RulePlan("adam", {})),
        (torch.optim.SparseAdam, {}, RulePlan("adam", {})),
        (torch.optim.AdamW, {}, RulePlan("adamw", {})),
        (torch.optim.Adam, {"decoupled_weight_decay": True}, RulePlan("adamw", {})),
        (Ftrl, {"l1": 0.5}, RulePlan("ftrl", {})),
        (
            RowwiseAdagrad,
            {"initial_accumulator_value": 0.5},
            RulePlan("rowwise_adagrad", {"initial_accumulator_value": 0.5}),
        ),
        (RowwiseAdam, {"betas": (0.5, 0.9)}, RulePlan("rowwise_adam", {})),
    ],
)
def test_a_table_gets_the_rule_of_its_optimizer(
    kind: Any, options: dict[str, Any], expected: RulePlan
) -> None:
    assert rule(kind, **options) == expected


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RMSprop, Mine])
def test_other_classes_are_refused_with_the_supported_ones(kind: Any) -> None:
    with refuses(PlanError, "table 'emb' is in ", f"{kind.__name__}; a table works with"):
        rule(kind)


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}, "dampening=0.1, expected 0"),
        (torch.optim.SGD, {"maximize": True}, "maximize=True, expected False"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True, expected False"),
        (torch.optim.AdamW, {"maximize": True}, "maximize=True"),
        (torch.optim.Adagrad, {"differentiable": True}, "differentiable=True"),
    ],
)
def test_other_options_are_refused(kind: Any, options: dict[str, Any], key: str) -> None:
    with pytest.raises(PlanError, match=rf"table 'emb' in .*{kind.__name__} has {key}"):
        rule(kind, **options)


def test_a_layers_own_rule_takes_only_the_learning_rate_of_its_group() -> None:
    group = {"lr": 0.1, "eps": 7.0, "weight_decay": 0.5, "betas": [0.1, 0.2], "maximize": True}
    for name in layer_rules():
        plan = own_rule(name, "emb")
        options = rule_options(plan, group)
        assert options["lr"] == 0.1
        assert {key: options[key] for key in plan.options} == plan.options
    adam = rule_options(own_rule("adam", "emb"), group)
    assert RULES["adam"].hyper(adam, 3).tolist() == RULES["adam"].hyper({"lr": 0.1}, 3).tolist()
    ftrl = rule_options(own_rule("ftrl", "emb"), {**group, "l1": 3.0, "beta": 7.0})
    assert RULES["ftrl"].hyper(ftrl).tolist() == RULES["ftrl"].hyper({"lr": 0.1}).tolist()
    with pytest.raises(PlanError, match=r"'emb': got optimizer='adagard', did you mean 'adagrad'"):
        own_rule("adagard", "emb")


def test_a_group_without_a_learning_rate_is_refused() -> None:
    with refuses(PlanError, "'adagrad' has no learning rate", "has rho, expected 'lr'"):
        rule_options(own_rule("adagrad", "emb"), {"rho": 0.1})


def test_options_are_sent_as_plain_values() -> None:
    optimizer = torch.optim.AdamW(
        [{"params": weights(), "odd": object()}], lr=torch.tensor(0.25), betas=(0.5, 0.75)
    )
    options = push_options(optimizer.param_groups[0])
    assert options["lr"] == 0.25
    assert options["betas"] == [0.5, 0.75]
    assert not {"params", "odd", "foreach", "fused", "capturable"} & options.keys()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options)) == options


def test_options_changed_by_a_scheduler_are_read_again() -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    plan = rule_of(optimizer, optimizer.param_groups[0], "emb")
    group = push_options({**optimizer.param_groups[0], "lr": 0.5})
    assert rule_options(plan, group)["lr"] == 0.5
    with pytest.raises(PlanError, match=r"momentum=0.9, but the table was planned with 0"):
        rule_options(plan, {**group, "momentum": 0.9})
    adam = rule_of(torch.optim.Adam(weights()), {"lr": 0.1}, "emb")
    with pytest.raises(PlanError, match="decoupled_weight_decay=True, but the table was planned"):
        rule_options(adam, {"lr": 0.1, "decoupled_weight_decay": True})
    with pytest.raises(PlanError, match="dampening=1"):
        rule_options(plan, {**group, "dampening": 1})


ELEMENTWISE = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "Rprop",
               "ASGD", "Adadelta"]  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_torch_classes_are_known(name: str) -> None:
    kind = getattr(torch.optim, name)
    plan = optimizer_plan(kind([{"params": [weight]} for weight in weights()], lr=0.1))
    assert (plan.groups, plan.elementwise) == (2, True)
    assert plan.class_name == f"{kind.__module__}.{name}"


def test_ftrl_may_split_parameters_and_rowwise_adam_may_not() -> None:
    assert optimizer_plan(Ftrl(weights(), lr=0.1)).elementwise
    assert not optimizer_plan(RowwiseAdam(weights())).elementwise


def test_other_classes_get_whole_parameters() -> None:
    assert not optimizer_plan(torch.optim.Adafactor(weights())).elementwise
    mine = optimizer_plan(Mine(weights()))
    assert not mine.elementwise
    assert mine.class_name.endswith("test_optimizers.Mine")


class Wrapper(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(params)


class Hoarder(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slow = {p: p.detach().clone() for p in params}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (torch.optim.LBFGS, r"its step\(\) needs closure"),
        (Wrapper, "it holds another optimizer in 'inner'"),
        (Hoarder, "it holds parameters in 'slow'"),
    ],
)
def test_classes_tied_to_the_model_are_refused(kind: Any, why: str) -> None:
    with pytest.raises(PlanError, match=rf"{kind.__name__} cannot step on .*: {why}"):
        optimizer_plan(kind(weights()))


def test_a_derived_class_of_fleetlight_counts_as_the_users() -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    optimizer.__class__ = type("Ours", (torch.optim.SGD,), {"__module__": "fleetlight.fleet.x"})
    assert optimizer_plan(optimizer).elementwise
    assert rule_of(optimizer, optimizer.param_groups[0], "emb").name == "sgd"


def test_options_are_rebuilt_after_a_change() -> None:
    group: dict[str, Any] = {"params": [1], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None}
    made = PushOptions()
    first = made.of(group)
    assert first == push_options(group)
    assert made.of(group) is first
    group["lr"] = 0.05
    assert made.of(group)["lr"] == 0.05
    group["momentum"] = 0.9
    assert made.of(group) == push_options(group)
    del group["momentum"]
    assert made.of(group) == push_options(group)


def test_mutable_options_are_read_each_time() -> None:
    for changes in ({"lr": torch.tensor(0.5)}, {"lr": 0.5, "betas": (torch.tensor(0.5), 0.99)}):
        group: dict[str, Any] = changes
        made = PushOptions()
        assert made.of(group) == push_options(group)
        (group["betas"][0] if "betas" in group else group["lr"]).fill_(0.25)
        assert made.of(group) == push_options(group)
    group = {"lr": 0.5, "betas": [0.5, 0.9]}
    made.of(group)
    group["betas"][0] = 0.8
    assert made.of(group)["betas"] == [0.8, 0.9]


# DenseBlocks: steps on servers equal steps in the process of the model.


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
    (server,) = DenseServers(params, [torch.optim.SGD(params, 1.0)], 1).servers
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
    for server in DenseServers(params, [torch.optim.Adam(params, 1.0)], 2, GEO).servers:
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


# Dense state moves between servers without a changed bit.


def sent(state: DenseState) -> DenseState:
    """As it arrives on the other side."""
    message = FetchedDense(state.state, state.scalars)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message)
    return DenseState(state.values, arrived.state, arrived.scalars, state.arrays)


def moved(old: DenseServers, make: Make, servers: int) -> DenseServers:
    """The same training on other servers."""
    params = parameters()
    new = DenseServers(params, [make(params)], servers)
    kept = whole(old.plan, old.placement, [sent(server.state()) for server in old.servers])
    for number, server in enumerate(new.servers):
        server.restore(sent(part(new.plan, new.placement, number, kept)))
    return new


def train(dense: DenseServers, steps: Sequence[int]) -> None:
    for step in steps:
        set_gradients(dense.parameters, step)
        dense.step()


@pytest.mark.parametrize("name", ["AdamW", *OTHERS])
def test_training_continues_with_another_number_of_servers(name: str) -> None:
    make = {"AdamW": two_groups, **OTHERS}[name]
    params = parameters()
    first = DenseServers(params, [make(params)], 2)
    train(first, range(2))
    second = moved(first, make, 3)
    train(second, range(2, 4))
    third = moved(second, make, 1)
    train(third, range(4, 6))
    third.take()
    for ours, plain in zip(third.parameters, trained_plainly(make, 6), strict=True):
        assert torch.equal(ours, plain)


def test_the_full_state_is_by_parameter() -> None:
    params = parameters()
    dense = DenseServers(params, [torch.optim.Adam(params, 0.1)], 3)
    set_gradients(params, 1)  # none for the first one
    dense.step()
    kept = whole(dense.plan, dense.placement, [server.state() for server in dense.servers])
    dense.take()
    for number, param in enumerate(params):
        assert np.array_equal(kept.values[number], param.detach().numpy().reshape(-1))
    assert kept.state[0] == PieceState({}, {})
    assert set(kept.state[1].tensors) == {"step", "exp_avg", "exp_avg_sq"}
    kind, average = kept.state[1].tensors["exp_avg"]
    assert params[1].grad is not None
    assert kind == ELEMENTS
    np.testing.assert_allclose(average, params[1].grad.reshape(-1) * 0.1, rtol=1e-5)
    kind, step = kept.state[1].tensors["step"]
    assert (kind, step.shape, float(step)) == (ODD, (), 1.0)


def test_state_of_geo_continues_in_other_modes() -> None:
    """There is no state of optimizers then: what they begin with stays."""
    params = parameters()
    geo = DenseServers(params, [OTHERS["Adagrad"](params)], 2, GEO)
    dense = DenseServers(params, [OTHERS["Adagrad"](params)], 3)
    kept = whole(geo.plan, geo.placement, [server.state() for server in geo.servers])
    for number, server in enumerate(dense.servers):
        server.restore(part(dense.plan, dense.placement, number, kept))
    train(dense, range(3))
    dense.take()
    for ours, plain in zip(params, trained_plainly(OTHERS["Adagrad"], 3), strict=True):
        assert torch.equal(ours, plain)


def test_numbers_keep_their_type() -> None:
    params = parameters()
    dense = DenseServers(params, [OTHERS["own"](params)], 1)
    train(dense, range(2))
    (server,) = dense.servers
    steps = [scalars["steps"] for scalars in sent(server.state()).scalars]
    assert steps == [1, 2, 2, 2]
    assert {type(step) for step in steps} == {int}


def test_bfloat16_state_keeps_its_bits() -> None:
    tensor = torch.randn(6).bfloat16()
    (state,) = [PieceState.of({"buffer": tensor.view(2, 3), "odd": tensor[:1]}, (2, 3), "p")]
    live = state.live((2, 3))
    assert live["buffer"].dtype is torch.bfloat16
    assert torch.equal(live["buffer"], tensor.view(2, 3))
    assert torch.equal(live["odd"], tensor[:1])


def test_state_is_a_copy() -> None:
    params = parameters()
    dense = DenseServers(params, [torch.optim.SGD(params, 0.1, momentum=0.9)], 1)
    train(dense, range(1))
    state = dense.servers[0].state()
    before = [array.copy() for array in (*state.values, *state.arrays)]
    train(dense, range(1, 3))
    for array, kept in zip((*state.values, *state.arrays), before, strict=True):
        assert np.array_equal(array, kept)


def test_state_that_cannot_be_sent_is_named() -> None:
    class Listing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["history"] = [1, 2]

    params = [nn.Parameter(torch.ones(2))]
    dense = DenseServers(params, [Listing(params)], 1)
    params[0].grad = torch.ones(2)
    dense.step()
    with pytest.raises(CheckpointError, match=r"keeps a list in 'history' of 'p0'"):
        dense.servers[0].state()


def test_entries_without_a_piece_are_refused() -> None:
    state = DenseState([], [(2, "exp_avg", ELEMENTS)], [{}, {}], [np.zeros(1)])
    with pytest.raises(CheckpointError, match="got 'exp_avg' of piece 2, but only 2 pieces"):
        state.pieces()


def test_mismatched_state_is_refused_before_any_is_loaded() -> None:
    servers = DenseServers(params := parameters(), [two_groups(params)], 1)
    train(servers, range(1))
    whole_state = servers.servers[0].state()
    before = [array.copy() for array in whole_state.values]
    missing = DenseState(
        [np.zeros_like(array) for array in whole_state.values],
        whole_state.state,
        whole_state.scalars,
        whole_state.arrays[:-1],
    )
    short = DenseState(
        missing.values,
        whole_state.state,
        whole_state.scalars,
        [array[:0] if array.size > 1 else array for array in whole_state.arrays],
    )
    first = (-1, *whole_state.state[0][1:])
    nowhere = DenseState(
        missing.values, [first, *whole_state.state[1:]], whole_state.scalars, whole_state.arrays
    )
    for state, why in ((missing, "tensors, expected"), (short, "elements"), (nowhere, "piece -1")):
        with pytest.raises(CheckpointError, match=why):
            servers.servers[0].restore(state)
        for now, then in zip(servers.servers[0].values(), before, strict=True):
            np.testing.assert_array_equal(now, then)
