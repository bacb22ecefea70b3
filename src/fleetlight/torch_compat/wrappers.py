# SPDX-License-Identifier: Apache-2.0
"""Torch's own ways to distribute a module, found where they are at work.

Why: none of them leaves a public mark on the module that it wraps. Where torch lacks a mark, such
a wrapper is not found; the classes themselves are public.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrappers_of(module: nn.Module) -> Iterator[str]:
    """What distributes a module, or a part of it, beside Fleetlight."""
    running = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if running is not None and any(part is module for part in running.modules()):
        yield "DistributedDataParallel"


def wrappers_in(module: nn.Module) -> Iterator[str]:
    """The same for what the module itself and its parameters tell, in or outside a forward."""
    for part in module.modules():
        if isinstance(part, (DistributedDataParallel, nn.DataParallel)):
            yield type(part).__name__
        elif getattr(part, "_is_fsdp_managed_module", False):
            yield "FSDP"
    # whoever has sharded a parameter has loaded this
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors and any(isinstance(p, tensors.DTensor) for p in module.parameters()):
        yield "a sharding into DTensors"
