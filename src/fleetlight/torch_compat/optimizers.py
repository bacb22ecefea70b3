# SPDX-License-Identifier: Apache-2.0
"""Optimizers: arithmetic on lists of tensors, and what schedulers and scalers look for.

Why the `torch._foreach_*` family: a loop over the parameters of a model costs up to ten times as
much for small ones. torch documents these functions but gives them private names.
`foreach_unscale_` and `foreach_update_scale_` are what `torch.amp.GradScaler` itself calls, so
results equal its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as all_optimizers

foreach_add_ = torch._foreach_add_
foreach_clamp_max = torch._foreach_clamp_max
foreach_clamp_min = torch._foreach_clamp_min
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub
foreach_sub_ = torch._foreach_sub_
foreach_zero_ = torch._foreach_zero_
#: (gradients, found, inverse): multiply gradients by `inverse`; `found` becomes 1 at an infinity
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
#: (scale, growth tracker, found, growth, backoff, interval): GradScaler.update for tensors
foreach_update_scale_ = torch._amp_update_scale_

#: the mark of a scheduler on the `step` that it wraps
SCHEDULED_STEP = "_wrapped_by_lr_sched"
#: the key in `GradScaler.state_dict` of the steps since the scale changed
GROWTH_TRACKER = "_growth_tracker"
#: the hooks of steps: of one optimizer, and of all
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
#: True in optimizers that unscale by themselves
_SCALES = "_step_supports_amp_scaling"


def count_as_stepped(optimizer: Optimizer) -> None:
    """Record a step for schedulers, which warn when they run before the first one.

    Where torch ignores the mark, they warn once.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def leave_scaling_to_step(optimizer: Optimizer) -> Callable[[], None]:
    """Let `GradScaler.step` call the step even after an infinity, with what it has found.

    torch documents it for optimizers that unscale by themselves, as its fused ones do. Returns
    a function that undoes it.
    """
    own = optimizer.__dict__
    before = {name: own[name] for name in (_SCALES,) if name in own}
    own[_SCALES] = True

    def take_back() -> None:
        del own[_SCALES]
        own.update(before)

    return take_back


def tell_infinity(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Let the scaler's next `update` treat this optimizer's gradients as infinite."""
    states = getattr(scaler, "_per_optimizer_states", {})
    if id(optimizer) in states:
        for found in states[id(optimizer)]["found_inf_per_device"].values():
            found.fill_(1.0)


def is_scaled_by(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """True while the scaler steps this optimizer. Why: an optimizer has no link to its scaler."""
    return id(optimizer) in getattr(scaler, "_per_optimizer_states", {})


def has_scheduler(optimizer: Optimizer) -> bool:
    """True when the optimizer has a learning-rate scheduler of torch.

    Why: an optimizer has no link to its schedulers, but the first one wraps its `step`.
    """
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def is_watched(optimizer: Optimizer, own_step: Callable[..., Any], own_hooks: int) -> bool:
    """True when code other than ours, or a scheduler of torch, learns of the optimizer's steps.

    `own_step` is our replacement of its `step`, `own_hooks` the number of our hooks. Why: torch
    tells neither who wrapped a step nor which hooks there are.
    """
    step: Any = optimizer.step
    if hasattr(step, SCHEDULED_STEP):
        is_own = getattr(step, "__wrapped__", None) is getattr(own_step, "__func__", own_step)
    else:
        is_own = step is own_step
    hooks = [getattr(optimizer, name, None) for name in _HOOKS]
    hooks += [getattr(all_optimizers, name, None) for name in _GLOBAL_HOOKS]
    return not is_own or None in hooks or sum(map(len, hooks)) > own_hooks  # type: ignore[arg-type]


@contextlib.contextmanager
def traced_as_compiled() -> Iterator[None]:
    """Inside the block `torch.compiler.is_compiling()` is True.

    Why: else an optimizer reads values of tensors that have none while its step is traced.
    torch 2.11 and newer have a context manager for it, older ones only the flag that it sets.
    """
    session: Any = getattr(torch.compiler, "_compile_session_context", None)
    if session is not None:
        with session():
            yield
        return
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
