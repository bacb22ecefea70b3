# SPDX-License-Identifier: Apache-2.0
"""Finds the module of the script that holds the modules a program has called.

A program sees calls of modules, not the object that owns them: `self.emb(ids)` within a method of
a model. The owner's names are those of an eager checkpoint, so a program takes them where it can.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch import Tensor, nn


class NamelessRoot(nn.Module):
    """Holds the modules of a program that no module of the script holds."""


def owner_of(modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> nn.Module | None:
    """The smallest module that holds all of these; None where none does, or no one is smallest."""
    holders = [one for one in _live_modules() if _holds(one, modules, parameters)]
    for one in holders:
        if all(_holds(other, [one], ()) for other in holders):
            return one
    return None


def _live_modules() -> list[nn.Module]:
    """All modules of the process. The type is asked, since an object may compute `__class__`."""
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), nn.Module) and not issubclass(type(one), NamelessRoot)
    ]


def _holds(holder: nn.Module, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> bool:
    # a module that is still being built, or was torn down, has no children to ask for
    if not holder.__dict__.get("_modules") and holder not in modules:
        return False
    inside = {id(module) for module in holder.modules()}
    if not all(id(module) in inside for module in modules):
        return False
    own = {id(parameter) for parameter in holder.parameters()} if parameters else set()
    return all(id(parameter) in own for parameter in parameters)
