# SPDX-License-Identifier: Apache-2.0
"""Derives from the user's torch optimizers what servers do with gradients.

A table has a rule for its rows; the optimizer's own class steps dense parameters. Each push brings
learning rates and other options, so schedulers stay on the workers.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import fleetlight.optim
from fleetlight.errors import PlanError, did_you_mean
from fleetlight.kernels import RULES
from fleetlight.optim.layerwise import user_class
from fleetlight.ps.plan import OptimizerPlan, RulePlan

#: options that rules do not support, and their required values
_PLAIN = {
    "maximize": False,
    "dampening": 0,
    "amsgrad": False,
    "differentiable": False,
}
#: elementwise optimizers: a parameter may be cut into pieces
_ELEMENTWISE: frozenset[type] = frozenset({
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop,
    torch.optim.ASGD, torch.optim.Adadelta, fleetlight.optim.Ftrl,
})  # fmt: skip
#: options for the implementation of a step, which the stepping process chooses
_PLACES = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_OPTIONS = frozenset({"params", "param_names"})


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], table: str) -> RulePlan:
    """The rule of a table whose `weight` is in the param group `group`."""
    kind = user_class(optimizer)
    readers = {
        rule.name: read
        for rule in RULES.values()
        for name, read in rule.optimizers.items()
        if kind in (getattr(torch.optim, name, None), getattr(fleetlight.optim, name, None))
    }
    if not readers:
        raise PlanError(f"table {table!r} is in the optimizer {class_path(kind)}; {what_works()}")
    _refuse_options(f"table {table!r} in {class_path(kind)}", group)
    for name, read in readers.items():
        if (options := read(group)) is not None:
            return RulePlan(name, options)
    raise PlanError(
        f"table {table!r} in {class_path(kind)}: none of the rules {', '.join(readers)} takes the "
        f"options of its param group; {what_works()}"
    )


def own_rule(name: str, table: str) -> RulePlan:
    """The rule that a layer names; it uses only the learning rate of its param group."""
    options = RULES[name].layer_options if name in RULES else None
    if options is None:
        raise PlanError(
            f"table {table!r}: got optimizer={name!r}, {did_you_mean(str(name), layer_rules())}"
        )
    # a rule without a decay of its own does not take that of the group
    return RulePlan(name, {"weight_decay": 0.0, **options})


def layer_rules() -> list[str]:
    """The rules that a layer may name."""
    return [rule.name for rule in RULES.values() if rule.layer_options is not None]


def what_works() -> str:
    """The optimizers and rules that a table supports, for error texts."""
    names = sorted({name for rule in RULES.values() for name in rule.optimizers})
    ours = [name for name in names if hasattr(fleetlight.optim, name)]
    theirs = [name for name in names if name not in ours]
    return (
        f"a table works with torch.optim.{', '.join(theirs)}, with fleet.optim.{', '.join(ours)}, "
        f"or with its layer's own optimizer=, one of {', '.join(layer_rules())}"
    )


def push_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group for a message: numbers, strings and lists."""
    return {
        key: _plain(value)
        for key, value in group.items()
        if key not in _NOT_OPTIONS and key not in _PLACES and _travels(value)
    }


class PushOptions:
    """`push_options` of one param group, cached until the group changes."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._from: list[Any] = []

    def of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The present push options; callers must not change the result."""
        values = [value for key, value in group.items() if key not in _NOT_OPTIONS]
        same = len(values) == len(self._from) and all(map(operator.is_, values, self._from))
        if not same or not all(map(_stays, values)):
            self._made, self._from = push_options(group), values
        return self._made


def _stays(value: Any) -> bool:
    """Whether a value is immutable, unlike a learning rate in a tensor."""
    if isinstance(value, tuple):
        return all(map(_stays, value))
    return value is None or isinstance(value, (bool, int, float, str))


def rule_options(rule: RulePlan, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a rule in one push: those of the pushed group, and its own fixed options.

    A scheduler may have changed the group since the rule was chosen, so they are checked again.
    """
    options = {**group, **rule.options}
    if "lr" not in options:
        raise PlanError(
            f"a push for the rule {rule.name!r} has no learning rate: the param group of the "
            f"table's weight has {', '.join(sorted(group)) or 'no options'}, expected 'lr'"
        )
    if "weight_decay" not in rule.options:  # else the layer named the rule and its options
        _refuse_options(f"a push for the rule {rule.name!r}", group)
        for key in RULES[rule.name].zero_options:
            if group.get(key):
                raise PlanError(
                    f"a push has {key}={group[key]!r}, but the table was planned with 0 and keeps "
                    f"no {key}; set it before init_server and init_worker"
                )
    return options


def optimizer_plan(optimizer: torch.optim.Optimizer) -> OptimizerPlan:
    """The plan by which servers step an optimizer; raises if they cannot."""
    kind = user_class(optimizer)
    for reason in _obstacles(optimizer, kind):
        raise PlanError(
            f"the optimizer {class_path(kind)} cannot step on parameter servers: {reason}. "
            "Use an optimizer that needs only gradients, such as those of torch.optim except "
            "LBFGS, or train with is_collective=True"
        )
    return OptimizerPlan(class_path(kind), len(optimizer.param_groups), kind in _ELEMENTWISE)


def class_path(kind: type) -> str:
    """`torch.optim.adamw.AdamW` for AdamW."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _refuse_options(who: str, group: Mapping[str, Any]) -> None:
    for key, plain in _PLAIN.items():
        if group.get(key, plain) != plain:
            raise PlanError(
                f"{who} has {key}={group[key]!r}, expected {plain!r}: the rules of tables do not "
                f"support it; {what_works()}"
            )


def _obstacles(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]
) -> Iterator[str]:
    """The reasons why servers cannot step the optimizer from pushed gradients."""
    needed = [
        parameter.name
        for parameter in list(inspect.signature(kind.step).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        yield (
            f"its step() needs {', '.join(needed)}, which computes the loss of the whole model "
            "again, but the model is on the workers"
        )
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "defaults"):
            continue
        if isinstance(value, torch.optim.Optimizer):
            yield f"it holds another optimizer in {name!r}, whose parameters are on the workers"
        elif any(id(item) in parameters for item in _contents(value)):
            yield f"it holds parameters in {name!r}, which are on the workers"


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def _travels(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_travels(item) for item in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
