# SPDX-License-Identifier: Apache-2.0
"""Keeps torch's compiler out of a process until the script compiles something.

An optimizer loads torch._dynamo, more than a second and 80 MiB, to tell it that here is nothing to
compile. While no other code has loaded it, the methods that torch hides from the compiler, and a
step, run without it. Where torch is built in another way, nothing changes, and the compiler loads.
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
#: the attribute of a function hidden from the compiler that replaces it in calls
_HIDDEN = "__dynamo_disable"


def postpone_compiler() -> None:
    """Let the methods of optimizers run without the compiler, until other code loads it.

    After that they call torch's own wrappers again.
    """
    code = _code_made_by(getattr(torch, "_disable_dynamo", None))
    for wrapped in vars(Optimizer).values():
        if code is not None and getattr(wrapped, "__code__", None) is code:
            plain = wrapped.__wrapped__
            vars(plain).setdefault(_HIDDEN, _without_compiler(plain, wrapped))


def _without_compiler(plain: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    def direct(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return plain(*args, **kwargs)
        if vars(plain).get(_HIDDEN) is direct:
            vars(plain).pop(_HIDDEN, None)
        return wrapped(*args, **kwargs)

    return direct


def late_step(stepped: Optimizer) -> Callable[..., Any]:
    """The `step` of an optimizer with its hooks, without the compiler until it is loaded."""
    wrapped = stepped.step
    plain = _plain_step(stepped)
    if plain is None:
        return wrapped

    @functools.wraps(plain)
    def direct(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    hooked = functools.partial(Optimizer.profile_hook_step(direct), stepped)

    is_scheduled = hasattr(wrapped, SCHEDULED_STEP)

    def step(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return wrapped(*args, **kwargs)
        if is_scheduled:
            # the scheduler's wrapper does this as well, and checks it
            count_as_stepped(stepped)
        return hooked(*args, **kwargs)

    return step


def _plain_step(stepped: Optimizer) -> Callable[..., Any] | None:
    """The step inside torch's wrapper for the compiler; None where `step` is anything else."""
    hooked = type(stepped).step
    inner = "__wrapped__" if hasattr(stepped.step, SCHEDULED_STEP) else "__func__"
    if getattr(stepped.step, inner, None) is not hooked:
        return None
    wrapped = getattr(hooked, "__wrapped__", None)
    code = _code_made_by(getattr(optimizer, "_use_grad_for_differentiable", None))
    if wrapped is None or code is None or getattr(wrapped, "__code__", None) is not code:
        return None
    plain: Callable[..., Any] = wrapped.__wrapped__
    return plain


def _code_made_by(wrapper: Callable[..., Any] | None) -> CodeType | None:
    """The code that all functions from this wrapper of torch share."""
    if wrapper is None:
        return None
    return getattr(wrapper(lambda: None), "__code__", None)
