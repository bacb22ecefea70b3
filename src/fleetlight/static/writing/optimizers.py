# SPDX-License-Identifier: Apache-2.0
"""Torch's optimizers in a program: which can be captured, and how a step becomes a graph."""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.optim import Ftrl, Lamb, Lars, RowwiseAdagrad, RowwiseAdam
from fleetlight.optim.each_parameter import EachRow
from fleetlight.optim.layerwise import user_class
from fleetlight.static.ops.marks import LAID_OUT, is_dense
from fleetlight.torch_compat.optimizers import traced_as_compiled

#: classes whose step as a graph equals the eager one, by a parity test
CAPTURED: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    Lars,
    Lamb,
    Ftrl,
    RowwiseAdagrad,
    RowwiseAdam,
)
#: torch has one kernel for the whole step of these, without temporary memory
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad)
State = dict[str, Any]


def check(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot be captured."""
    kind = user_class(optimizer)
    if kind not in CAPTURED:
        names = ", ".join(known.__name__ for known in CAPTURED)
        raise PlanError(
            f"got the optimizer {kind.__name__}, expected one whose steps can be captured: {names}"
            "; train eagerly with others"
        )
    for group in optimizer.param_groups:
        if group.get("dampening"):
            raise PlanError(
                f"got SGD with dampening={group['dampening']}: its first step differs from "
                "later ones, but a program has one; train eagerly, or with dampening=0"
            )


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state as before its first step.

    Optimizers create it in that step. So a step runs on copies, with zero gradients; its step
    counts are reset.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in optimizer.state:
                state = _first_state(optimizer, group, parameter)
                if state:
                    optimizer.state[parameter] = state


def _first_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> State:
    one = parameter.detach().clone()
    if isinstance(optimizer, EachRow):
        return optimizer.first_state(one, dict(group))
    one.grad = torch.zeros_like(one)
    double = _double(optimizer, [{**group, "params": [one], "lr": 0.0}], {})
    with torch.no_grad():
        _bare_step(double)
    return {
        key: torch.zeros_like(value) if isinstance(value, Tensor) else value
        for key, value in double.state[one].items()
    }


def step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Sequence[Tensor]],
    gradients: Mapping[Tensor, Tensor],
    states: Mapping[Tensor, State],
    rates: Sequence[Tensor],
) -> None:
    """Make the optimizer's step on other tensors: those that are being traced."""
    groups = [
        _traced(optimizer, {**group, "params": list(mine), "lr": rate}, states)
        for group, mine, rate in zip(optimizer.param_groups, parameters, rates, strict=True)
    ]
    taken: dict[Tensor, State] = {}
    for group in groups:
        for parameter in group["params"]:
            gradient, state = gradients.get(parameter), states.get(parameter, {})
            if gradient is not None and group["fused"]:
                gradient = LAID_OUT(gradient, parameter)
            parameter.grad = gradient
            taken[parameter] = state if group["fused"] else _exact(optimizer, state)
    double = _double(optimizer, groups, taken)
    # otherwise it reads its tensors, which have no values yet
    with traced_as_compiled(), torch.no_grad():
        _bare_step(double)
    for parameter, state in taken.items():
        parameter.grad = None
        if "step" in state and state is not states[parameter]:
            states[parameter]["step"].copy_(state["step"])


def _traced(
    optimizer: torch.optim.Optimizer, group: State, states: Mapping[Tensor, State]
) -> State:
    """The group with torch's fused step if it has one, else with the foreach step."""
    fused = isinstance(optimizer, _FUSED) and not group["differentiable"]
    kinds = {(p.dtype, p.device) for p in group["params"]}
    for parameter in group["params"]:
        kept = states.get(parameter, {}).values()
        tensors = [value for value in kept if isinstance(value, Tensor)]
        fused = fused and len(kinds) == 1 and parameter.is_floating_point() and is_dense(parameter)
        fused = fused and all(
            value.device == parameter.device
            and (value.dim() == 0 or value.stride() == parameter.stride())
            for value in tensors
        )
    # "capturable" counts steps in a tensor
    more = {"capturable": True} if "capturable" in group else {}
    return {**group, **more, "fused": fused, "foreach": not fused}


def _exact(optimizer: torch.optim.Optimizer, state: State) -> State:
    """The state with float64 step counts: powers of numbers near 1 need Python's digits."""
    if not isinstance(optimizer, _FUSED):
        # these only count
        return state
    return {k: v.to(torch.float64) if k == "step" else v for k, v in state.items()}


def _double(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    states: Mapping[Tensor, State],
) -> torch.optim.Optimizer:
    """A copy of the optimizer with other tensors and without hooks."""
    double = copy.copy(optimizer)
    double.param_groups = groups
    double.state = collections.defaultdict(dict, states)
    return double


def _bare_step(optimizer: torch.optim.Optimizer) -> None:
    inspect.unwrap(type(optimizer).step)(optimizer)
