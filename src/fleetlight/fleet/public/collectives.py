# SPDX-License-Identifier: Apache-2.0
"""Collective operations for scripts, on tensors, arrays and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetlight.errors import ConfigError
from fleetlight.fleet.job import current
from fleetlight.fleet.training.consistency import check_same_shape
from fleetlight.fleet.training.dgc import clipping_error, uses_dgc

_Back = Callable[[Tensor], Any]


def barrier_worker() -> None:
    """Wait until every worker is here; afterwards all workers have equal values.

    Workers that train alone (LocalSGD, DiLoCo) average here, so call it before an evaluation.

    Raises:
        DeadlineError: a worker did not arrive in time; the message names it.

    Example:
        >>> fleet.init()
        >>> fleet.barrier_worker()
    """
    job = current()
    job.barrier()
    for model in job.models:
        model.broadcast_buffers()


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Reduce `value` (a tensor, an array, a number) over all workers by sum, max or min.

    All must pass the same dtype and shape. A sum of booleans is an integer.

    Args:
        value: this worker's value: a tensor, a NumPy array or a number.
        op: `"sum"`, `"max"` or `"min"`.

    Returns:
        The reduced value, of the type of `value`, on every worker.

    Raises:
        ConfigError: the value has another type, or `op` is unknown.
        DivergedError: dtypes or shapes differ between the workers.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.all_reduce(2.5)
        2.5
        >>> fleet.all_reduce(torch.tensor([1, 2]), "max")
        tensor([1, 2])
    """
    group = current().group
    if op == "sum" and isinstance(value, (bool, np.bool_)):
        value = int(value)
    tensor, back = _as_tensor(value)
    check_same_shape(group, tensor, "all_reduce")
    return back(group.all_reduce(tensor.clone(), op))


def all_gather(value: Any) -> list[Any]:
    """The `value` of each worker, in their order; dtypes and shapes must be equal.

    Args:
        value: this worker's value: a tensor, a NumPy array or a number.

    Returns:
        A list with one value for each worker.

    Raises:
        ConfigError: the value has another type.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.all_gather(fleet.worker_index())
        [0]
    """
    group = current().group
    tensor, back = _as_tensor(value)
    check_same_shape(group, tensor, "all_gather")
    return [back(one) for one in group.all_gather(tensor)]


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; returns the norm.

    Call it between backward and step. By then all workers have the same gradients, unless they
    train alone. While gradients are still being merged, it only returns the norm.

    Args:
        model: the registered model, or some of its parameters.
        max_norm: the largest norm.
        norm_type: the kind of norm; `float("inf")` for the largest absolute value.

    Returns:
        The norm before the gradients were scaled.

    Raises:
        ConfigError: the strategy uses DGC, which clips by its own setting.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(2, 1, bias=False))
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> fleet.clip_grad_norm_(model, 1.0)
        tensor(5.)
        >>> model.weight.grad.norm()
        tensor(1.0000)
    """
    job = current()
    if uses_dgc(job):
        raise clipping_error("fleet.clip_grad_norm_")
    merges = [managed.merge for managed in job.optimizers if managed.merge is not None]
    if any(merge.is_between() for merge in merges):
        max_norm = float("inf")
    for merge in merges:
        merge.complete()
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    for managed in job.models:
        if managed.replica is not None and not managed.trains_locally:
            used = managed.reductions_at_step if managed.has_any_of(parameters) else -1
            managed.replica.ensure_reduced(expected=bool(job.no_sync_depth), used=used)
    return job.clip(parameters, max_norm, norm_type)


def _as_tensor(value: Any) -> tuple[Tensor, _Back]:
    """The value as a tensor, and a function that converts a tensor back."""
    if isinstance(value, Tensor):
        return value.detach(), lambda tensor: tensor
    if isinstance(value, np.ndarray):
        # a copy, since torch warns of read-only arrays
        return torch.from_numpy(np.array(value, order="C")), lambda tensor: tensor.numpy()
    if isinstance(value, (bool, np.bool_)):
        return torch.tensor(int(value)), lambda tensor: type(value)(tensor.item())
    if isinstance(value, (int, np.integer)):
        kind = value.dtype if isinstance(value, np.integer) else None
        return _whole(int(value)), lambda tensor: _int_of(tensor, kind)
    if isinstance(value, (float, np.floating)):
        return torch.tensor(float(value), dtype=torch.float64), _float_of(value)
    raise ConfigError(f"got a {type(value).__name__}, expected a tensor, a NumPy array or a number")


def _whole(value: int) -> Tensor:
    if not -(2**63) <= value < 2**63:
        raise ConfigError(f"got {value}, expected an integer of 64 bits")
    return torch.tensor(value, dtype=torch.int64)


def _int_of(tensor: Tensor, kind: np.dtype[Any] | None) -> Any:
    """A Python integer, or a NumPy integer of the value's type if the result fits."""
    number = int(tensor)
    if kind is None:
        return number
    fits = np.iinfo(kind).min <= number <= np.iinfo(kind).max
    return kind.type(number) if fits else np.int64(number)


def _float_of(value: Any) -> _Back:
    """Converts a tensor to a float, or to the value's NumPy type."""
    kind = type(value) if isinstance(value, np.floating) else float
    return lambda tensor: kind(tensor.item())
