# SPDX-License-Identifier: Apache-2.0
"""The servers' plans are derived from the user's optimizers; unsupported ones are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from fleetlight.errors import PlanError
from fleetlight.kernels import RULES
from fleetlight.optim import Ftrl, RowwiseAdagrad, RowwiseAdam
from fleetlight.ps.plan import RulePlan
from fleetlight.ps.tables.optimizers import (
    PushOptions,
    layer_rules,
    optimizer_plan,
    own_rule,
    push_options,
    rule_of,
    rule_options,
)


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
    with pytest.raises(
        PlanError, match=rf"table 'emb' is in .*{kind.__name__}; a table works with"
    ):
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
    with pytest.raises(
        PlanError, match=r"'adagrad' has no learning rate: .* has rho, expected 'lr'"
    ):
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
    groups = [{"params": [weight]} for weight in weights()]
    plan = optimizer_plan(kind(groups, lr=0.1))
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
