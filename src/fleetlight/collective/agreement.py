# SPDX-License-Identifier: Apache-2.0
"""What workers must agree on before they train, and how the first difference is told."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from fleetlight.collective.group import Group
from fleetlight.errors import PlanError
from fleetlight.observe.log import logger

Entry = tuple[str, str]


def check_same_module(module: nn.Module, group: Group) -> None:
    """Every worker must have built the same model; else name the first difference."""
    if group.alone:
        return
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise PlanError(
            f"{lazy[0]} has no shape yet (a lazy module); run one batch through the model before "
            "its first forward that trains, under torch.no_grad() and before distributed_model"
        )
    mine = msgspec.json.encode(describe(module))
    digests = group.gather_bytes(hashlib.sha256(mine).digest(), "comparing the models")
    if len(set(digests)) == 1:
        return
    everybody = group.gather_bytes(mine, "comparing the models")
    decoded = [msgspec.json.decode(data, type=list[Entry]) for data in everybody]
    other = next(i for i, entries in enumerate(decoded) if entries != decoded[0])
    raise PlanError(
        f"the workers built different models: {first_difference(decoded[0], decoded[other], other)}"
        "; build the same model from the same script and settings everywhere"
    )


def describe(module: nn.Module) -> list[Entry]:
    """Name and kind of each parameter and buffer, in order."""
    entries = [
        (name, f"{_kind(p)}{'' if p.requires_grad else ', frozen'}")
        for name, p in module.named_parameters()
    ]
    return entries + [(name, f"buffer, {_kind(b)}") for name, b in module.named_buffers()]


def first_difference(zero: Sequence[Entry], other: Sequence[Entry], index: int) -> str:
    """A sentence about the first entry in which a worker differs from worker 0."""
    for mine, theirs in zip(zero, other, strict=False):
        if mine[0] != theirs[0]:
            return f"worker 0 has {mine[0]} where worker {index} has {theirs[0]}"
        if mine != theirs:
            return f"{mine[0]} is {mine[1]} on worker 0, but {theirs[1]} on worker {index}"
    longer = zero if len(zero) > len(other) else other
    who, whom = (0, index) if longer is zero else (index, 0)
    return f"worker {who} has {longer[min(len(zero), len(other))][0]}, worker {whom} does not"


def warn_if_same_records(inputs: Any, group: Group) -> None:
    """Two workers whose first batches are equal probably read the same records."""
    if group.alone:
        return
    digests = group.gather_bytes(_digest(inputs), "comparing the first batches")
    seen: dict[bytes, int] = {}
    for index, digest in enumerate(digests):
        if digest in seen:
            if group.index == 0 and digest:
                logger.warning(
                    "workers %d and %d got the same first batch: they may read the same records; "
                    "fleet.shard(loader) gives each its own part",
                    seen[digest],
                    index,
                )
            return
        seen[digest] = index


def _digest(inputs: Any) -> bytes:
    """A fingerprint of the tensors of a batch; empty when there are none."""
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    if not tensors:
        return b""
    fingerprint = hashlib.sha256()
    for tensor in tensors:
        part = tensor.detach().reshape(-1)[: 1 << 16].float().cpu().contiguous()
        fingerprint.update(str(tuple(tensor.shape)).encode() + part.numpy().tobytes())
    return fingerprint.digest()


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
