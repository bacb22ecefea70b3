# SPDX-License-Identifier: Apache-2.0
"""Keeps torch's compiler out of a process until somebody compiles something.

An optimizer loads torch._dynamo, more than a second and 80 MiB, only to tell it that here is
nothing to compile. So it is not told, as long as nobody has loaded it: not by the methods that
torch hides from the compiler, and not by a step. Where torch is built otherwise, nothing is
changed, and the compiler is loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.optim import Optimizer, optimizer

from fleetlight.torch_compat.optimizers import SCHEDULED_STEP, count_as_stepped

_COMPILER = "torch._dynamo"
#: where a function that torch hides from the compiler keeps how it is called
_HIDDEN = "__dynamo_disable"


def postpone_compiler() -> None:
    """Let the methods of optimizers be called without the compiler, until something has loaded it.

    From then on it is told what torch has to tell it.
    """
    code = _code_made_by(getattr(torch, "_disable_dynamo", None))
    for told in vars(Optimizer).values():
        if code is not None and getattr(told, "__code__", None) is code:
            plain = told.__wrapped__
            vars(plain).setdefault(_HIDDEN, _untold(plain, told))


def _untold(plain: Callable[..., Any], told: Callable[..., Any]) -> Callable[..., Any]:
    def untold(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return plain(*args, **kwargs)
        if vars(plain).get(_HIDDEN) is untold:
            vars(plain).pop(_HIDDEN, None)
        return told(*args, **kwargs)

    return untold


def late_step(stepped: Optimizer) -> Callable[..., Any]:
    """The `step` of an optimizer, hooks and all, without the compiler until it is loaded."""
    told = stepped.step
    plain = _plain_step(stepped)
    if plain is None:
        return told

    @functools.wraps(plain)
    def untold(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    hooked = functools.partial(Optimizer.profile_hook_step(untold), stepped)

    is_scheduled = hasattr(told, SCHEDULED_STEP)

    def step(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return told(*args, **kwargs)
        if is_scheduled:
            # as the scheduler's does, which asks for it
            count_as_stepped(stepped)
        return hooked(*args, **kwargs)

    return step


def _plain_step(stepped: Optimizer) -> Callable[..., Any] | None:
    """What torch has wrapped to tell the compiler; None where `step` is something else."""
    hooked = type(stepped).step
    inner = "__wrapped__" if hasattr(stepped.step, SCHEDULED_STEP) else "__func__"
    if getattr(stepped.step, inner, None) is not hooked:
        return None
    told = getattr(hooked, "__wrapped__", None)
    code = _code_made_by(getattr(optimizer, "_use_grad_for_differentiable", None))
    if told is None or code is None or getattr(told, "__code__", None) is not code:
        return None
    plain: Callable[..., Any] = told.__wrapped__
    return plain


def _code_made_by(wrapper: Callable[..., Any] | None) -> CodeType | None:
    """What all functions have in common that this wrapper of torch's has made."""
    if wrapper is None:
        return None
    return getattr(wrapper(lambda: None), "__code__", None)
