# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer by parameter name, so that order and number of workers never matter.

Torch's own `load_state_dict` goes by position and casts state to the parameter's dtype; both would
change a run that resumes. Here names decide, and every dtype and number comes back as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetlight.checkpoint.formats.values import Json, pack, unpack
from fleetlight.checkpoint.state.model import compare, refuse_differences
from fleetlight.checkpoint.storage.manifest import GroupEntry, OptimizerEntry
from fleetlight.errors import CheckpointError

Names = Mapping[nn.Parameter, str]


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """An optimizer's record, and its tensors: the live ones, not copies."""

    entry: OptimizerEntry
    tensors: Mapping[str, Tensor]


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Names,
    state: Mapping[Tensor, Mapping[str, Any]] | None = None,
) -> OptimizerState:
    """All state and hyper-parameters of an optimizer; `names` has the names of its parameters.

    Works for every optimizer whose state is tensors, numbers, strings and containers of these.
    `state` replaces the optimizer's own, if another object keeps it.
    """
    tensors: dict[str, Tensor] = {}
    groups = [
        _pack_group(index, group, names, tensors)
        for index, group in enumerate(optimizer.param_groups)
    ]
    params = {_name(p, names, "state"): p for g in optimizer.param_groups for p in g["params"]}
    packed = {
        (name := _name(param, names, "state")): _pack_state(name, values, tensors)
        for param, values in (optimizer.state if state is None else state).items()
    }
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    return OptimizerState(OptimizerEntry(class_name(optimizer), shapes, groups, packed), tensors)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Names, state: OptimizerState
) -> None:
    """Put `state` into the optimizer, or raise and change nothing."""
    prepare_optimizer_load(optimizer, names, state)()


def prepare_optimizer_load(
    optimizer: torch.optim.Optimizer,
    names: Names,
    state: OptimizerState,
    elsewhere: Collection[Tensor] = (),
) -> Callable[[], None]:
    """Compare `state` with the optimizer; return a function that loads it, or raise.

    The state of parameters that are kept `elsewhere` is neither compared nor changed.
    """
    others = {id(param) for param in elsewhere}
    refuse_differences("optimizer", list(_differences(optimizer, names, state.entry, others)))
    options = [_options_for(group, names, state) for group in optimizer.param_groups]
    values = {
        param: _values_for(param, names[param], saved, state)
        for group, saved in zip(optimizer.param_groups, options, strict=True)
        for param in group["params"]
        if names[param] in state.entry.state and id(param) not in others
    }

    def load() -> None:
        for group, saved in zip(optimizer.param_groups, options, strict=True):
            _load_options(group, saved)
        kept = {param: one for param, one in optimizer.state.items() if id(param) in others}
        optimizer.state.clear()
        optimizer.state.update({**kept, **values})

    return load


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The user's class: one that this package derived from it saves and loads the same state."""
    for base in type(optimizer).__mro__:
        if not base.__module__.startswith("fleetlight."):
            return base.__qualname__
    raise AssertionError("unreachable: every class ends in `object`")


def _name(param: object, names: Names, where: str) -> str:
    if not isinstance(param, nn.Parameter) or param not in names:
        got = tuple(param.shape) if isinstance(param, Tensor) else repr(param)
        raise CheckpointError(
            f"optimizer {where} has an entry for {got}, which is not a parameter of the model; "
            f"expected only parameters of the model that is saved"
        )
    return names[param]


def _pack_group(
    index: int, group: Mapping[str, Any], names: Names, tensors: dict[str, Tensor]
) -> GroupEntry:
    where = f"param_groups.{index}"
    params = [_name(param, names, where) for param in group["params"]]
    options = {
        key: pack(value, f"{where}.{key}", tensors)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return GroupEntry(params, options)


def _pack_state(
    name: str, values: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Json]:
    return {key: pack(value, f"{name}.{key}", tensors) for key, value in values.items()}


def _differences(
    optimizer: torch.optim.Optimizer, names: Names, saved: OptimizerEntry, others: Collection[int]
) -> Iterator[str]:
    if class_name(optimizer) != saved.class_name:
        yield f"it is {class_name(optimizer)} here, but {saved.class_name} in the checkpoint"
    live = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name, shape = _name(param, names, f"param_groups.{index}"), tuple(param.shape)
            live[name] = saved.shapes.get(name, shape) if id(param) in others else shape
    yield from compare(live, saved.shapes, "parameter")


def _options_for(
    group: Mapping[str, Any], names: Names, state: OptimizerState
) -> Mapping[str, Any]:
    """The saved hyper-parameters of this group's parameters, which must agree on them."""
    members = {names[param] for param in group["params"]}
    sources = [saved for saved in state.entry.param_groups if members.intersection(saved.params)]
    if any(source.options != sources[0].options for source in sources[1:]):
        raise CheckpointError(
            f"the checkpoint does not match the optimizer: the param group of {min(members)!r} was "
            f"{len(sources)} groups with different options when saved; nothing was loaded. "
            f"Build the same param groups"
        )
    packed = sources[0].options if sources else {}
    return {key: unpack(value, state.tensors) for key, value in packed.items()}


def _load_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        live = group.get(key)
        if isinstance(live, Tensor) and isinstance(value, Tensor):
            # A captured or compiled step reads this very tensor.
            live.detach().copy_(value)
        else:
            group[key] = _copy(value, torch.device("cpu"))


def _values_for(
    param: Tensor, name: str, options: Mapping[str, Any], state: OptimizerState
) -> dict[str, Any]:
    """Copies on the parameter's device; step counters on the CPU unless a kernel reads them."""
    on_device = options.get("capturable") or options.get("fused")
    step_device = param.device if on_device else torch.device("cpu")
    return {
        key: _copy(unpack(item, state.tensors), step_device if key == "step" else param.device)
        for key, item in state.entry.state[name].items()
    }


def _copy(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item, device) for key, item in value.items()}
    return value
