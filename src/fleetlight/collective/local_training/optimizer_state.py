# SPDX-License-Identifier: Apache-2.0
"""The optimizer state after local steps: its mean over the workers, or a reset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from fleetlight.collective.group import Group
from fleetlight.collective.local_training.outer import Means
from fleetlight.errors import DivergedError

_OPERATION = "averaging optimizer state"


class _Entry(NamedTuple):
    """The place, type and shape of a tensor of the state, equal on all workers."""

    group: int
    parameter: int
    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        return f"state/{self.key}/{self.group}.{self.parameter}"

    @property
    def counts(self) -> bool:
        """True for single numbers and integers, such as the number of steps."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return not self.shape or not (dtype.is_floating_point or dtype.is_complex)


@torch.no_grad()
def average(optimizer: torch.optim.Optimizer, means: Means, group: Group) -> None:
    """Give all workers the mean of their states; all workers call it.

    Step counters become the largest of all. A worker without state for a parameter that got no
    gradient contributes zeros. State that is not a tensor stays each worker's own.
    """
    entries = _common(_entries(optimizer), group)
    tensors = {entry: _tensor(optimizer, entry) for entry in entries}
    _take_largest([tensor for entry, tensor in tensors.items() if entry.counts], group)
    named = {entry.name: tensor for entry, tensor in tensors.items() if not entry.counts}
    if named:
        means.mean(named, _OPERATION)


def reset(optimizer: torch.optim.Optimizer, *, in_place: bool = False) -> None:
    """Reset the state. `in_place`: other code holds references to its tensors."""
    if in_place or isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _restart(optimizer.state.get(parameter, {}), group)
    else:
        optimizer.state.clear()


def _restart(state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Write the first values of torch's optimizers: zero, with these exceptions."""
    first = {
        "sum": group.get("initial_accumulator_value", 0.0),
        "step_size": group["lr"],
        "eta": group["lr"],
        "mu": 1.0,
        "mu_product": 1.0,
    }
    for key, value in state.items():
        if isinstance(value, Tensor):
            value.fill_(float(first.get(key, 0.0)))


def _parameter(optimizer: torch.optim.Optimizer, entry: _Entry) -> Tensor:
    parameter: Tensor = optimizer.param_groups[entry.group]["params"][entry.parameter]
    return parameter


def _entries(optimizer: torch.optim.Optimizer) -> list[_Entry]:
    return [
        _Entry(number, index, key, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and value.numel()
    ]


def _common(mine: list[_Entry], group: Group) -> list[_Entry]:
    """The entries of any worker, in one order on all."""
    data = msgspec.json.encode(mine)
    digests = group.gather_bytes(hashlib.sha256(data).digest(), _OPERATION)
    if len(set(digests)) == 1:
        return mine
    gathered = group.gather_bytes(data, _OPERATION)
    kinds = {entry for one in gathered for entry in msgspec.json.decode(one, type=list[_Entry])}
    _check_kinds(kinds)
    return sorted(kinds)


def _check_kinds(entries: Iterable[_Entry]) -> None:
    seen: dict[str, _Entry] = {}
    for entry in sorted(entries):
        other = seen.setdefault(entry.name, entry)
        if other != entry:
            raise DivergedError(
                f"the optimizers of the workers keep different state: {entry.key} of parameter "
                f"{entry.parameter} in group {entry.group} is {entry.dtype}{list(entry.shape)} on "
                f"one worker and {other.dtype}{list(other.shape)} on another; make the same "
                "optimizer on all workers"
            )


def _tensor(optimizer: torch.optim.Optimizer, entry: _Entry) -> Tensor:
    """The tensor of an entry; zeros where only another worker has one."""
    parameter = _parameter(optimizer, entry)
    state = optimizer.state[parameter]
    if entry.key not in state:
        group = optimizer.param_groups[entry.group]
        on_device = entry.shape or group.get("capturable") or group.get("fused")
        device = parameter.device if on_device else torch.device("cpu")
        dtype = getattr(torch, entry.dtype)
        state[entry.key] = torch.zeros(entry.shape, dtype=dtype, device=device)
    tensor: Tensor = state[entry.key]
    return tensor


def _take_largest(counters: list[Tensor], group: Group) -> None:
    """Take the maximum of each counter over the workers, in one message."""
    if not counters:
        return
    flat = torch.cat([counter.detach().reshape(-1).double().cpu() for counter in counters])
    group.all_reduce(flat, "max")
    for counter, part in zip(
        counters, torch.split(flat, [c.numel() for c in counters]), strict=True
    ):
        counter.copy_(part.view_as(counter))
