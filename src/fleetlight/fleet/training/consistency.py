# SPDX-License-Identifier: Apache-2.0
"""Settings that must be equal on all workers, and the comparison of tensors that scripts give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleetlight.collective.data_parallel.consistency import Terms
from fleetlight.errors import ConfigError
from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import Peers

#: settings that may differ between workers, such as how long one waits
_OWN = {"deadline_s", "ssl", "checkpoint", "execution_strategy", "fetch_frequency"}
#: entries of param groups that change how an optimizer computes, not its result
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}


def settings_of(job: Job) -> Terms:
    """What does not change after training begins: the strategy and the sharded loaders."""
    settings = [item for item in job.strategy.items() if item[0] not in _OWN]
    loaders = [
        (f"sharded loader {number}", loader.settings()) for number, loader in enumerate(job.loaders)
    ]
    return [*((f"strategy.{name}", value) for name, value in settings), *loaders]


def terms_of(job: Job) -> Terms:
    """What may change during training: the number of steps, and the param groups."""
    terms: list[tuple[str, object]] = [("the number of optimizer steps", job.step)]
    for number, managed in enumerate(job.optimizers):
        terms += _optimizer_terms(managed.optimizer, number)
    return terms


def _optimizer_terms(optimizer: torch.optim.Optimizer, number: int) -> list[tuple[str, object]]:
    groups = [
        (f"group {index} of optimizer {number}", _plain_values(group))
        for index, group in enumerate(optimizer.param_groups)
    ]
    return [(f"the class of optimizer {number}", type(optimizer).__name__), *groups]


def _plain_values(group: dict[str, Any]) -> dict[str, object]:
    """The numbers, strings and booleans of a group, which may hold other values, too."""
    values = {name: _plain(value) for name, value in group.items() if name not in _HOW}
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> object:
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, float):
        # the last digits may differ between kinds of processors
        return float(f"{value:.6g}")
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return None


def check_same_shape(group: Peers, tensor: Tensor, operation: str) -> None:
    """ConfigError unless every worker gives a tensor of the same type and shape."""
    kinds = group.gather_bytes(f"{tensor.dtype} {list(tensor.shape)}".encode(), operation)
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ConfigError(
                f"{operation}: worker 0 passed {kinds[0].decode()}, worker {index} passed "
                f"{kind.decode()}; all must pass the same dtype and shape"
            )
