# SPDX-License-Identifier: Apache-2.0
"""Modules: their own tables of parameters, buffers and children, and what torch calls with them.

Why: the public iterators give each tensor once and only those that are not None. These tables are
where a tensor is put back. They have been the same since the first versions of torch.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn

# the common base of BatchNorm1d, 2d and 3d, and of SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# the common base of all kinds of dropout
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _reparametrize_module

__all__ = [
    "BatchNorm",
    "Dropout",
    "buffers",
    "check_batch_norm_input",
    "children",
    "parameters",
    "with_tensors",
    "with_versions_of",
    "wrappers_in",
    "wrappers_of",
]


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name, live."""
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name, live."""
    return module._buffers


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own children by name, live: a module that is used twice comes twice."""
    return module._modules


def check_batch_norm_input(norm: BatchNorm, x: Tensor) -> None:
    """Raise torch's own error about a wrong number of dimensions."""
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]


def with_tensors(module: nn.Module, tensors: dict[str, Any]) -> AbstractContextManager[None]:
    """Give the module these tensors in the block; the dict then has what it replaced them by.

    `torch.func.functional_call` does the same for one call, but hides replacements.
    """
    return cast("AbstractContextManager[None]", _reparametrize_module(module, tensors))


def with_versions_of(live: Mapping[str, Any], values: OrderedDict[str, Any]) -> None:
    """Copy the module versions of a live state_dict to another one.

    Without them torch assumes an old version and converts the state_dict.
    """
    values._metadata = live._metadata  # type: ignore[attr-defined]


def wrappers_of(module: nn.Module) -> Iterator[str]:
    """Names of what else distributes a module that runs now, or a part of it.

    Why: torch's own ways leave no public mark on the module that they wrap. Where torch lacks a
    mark, such a wrapper is not found; the classes themselves are public.
    """
    running = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if running is not None and any(part is module for part in running.modules()):
        yield "DistributedDataParallel"


def wrappers_in(module: nn.Module) -> Iterator[str]:
    """Names of what else distributes a module, by its parts and its parameters."""
    for part in module.modules():
        if isinstance(part, (DistributedDataParallel, nn.DataParallel)):
            yield type(part).__name__
        elif getattr(part, "_is_fsdp_managed_module", False):
            yield "FSDP"
    # a sharded parameter implies that this module is loaded
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors and any(isinstance(p, tensors.DTensor) for p in module.parameters()):
        yield "a sharding into DTensors"
