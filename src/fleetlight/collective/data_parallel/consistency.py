# SPDX-License-Identifier: Apache-2.0
"""Compares what must be equal on all workers, and names the first difference.

Before the first forward, the workers compare their models and their terms: named values such as the
settings of a strategy. Terms that may change during training, such as learning rates, are compared
at each step, by a checksum that travels with the gradients.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fleetlight.collective.group import Group
from fleetlight.collective.stamp import GradientStamp
from fleetlight.errors import DivergedError, PlanError
from fleetlight.observe.log import logger
from fleetlight.torch_compat.tensors import tree_flatten

Entry = tuple[str, str]
#: names and values; a mapping stands for its items
Terms = Sequence[tuple[str, object]]


def check_same_module(module: nn.Module, group: Group, terms: Terms = ()) -> None:
    """Raise unless all workers train one model on equal terms."""
    if group.alone:
        return
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise PlanError(
            f"{lazy[0]} has no shape yet (a lazy module); run one batch through the model before "
            "its first forward that trains, under torch.no_grad() and before distributed_model"
        )
    mine = msgspec.json.encode((entries_of(terms), describe(module)))
    digests = group.gather_bytes(hashlib.sha256(mine).digest(), "comparing the models")
    if len(set(digests)) == 1:
        return
    gathered = group.gather_bytes(mine, "comparing the models")
    decoded = [msgspec.json.decode(data, type=tuple[list[Entry], list[Entry]]) for data in gathered]
    for kind, remedy in enumerate(_DIFFERENT):
        entries = [one[kind] for one in decoded]
        if difference := _difference(entries):
            raise PlanError(remedy.format(difference))


def check_buffers(module: nn.Module) -> None:
    """Refuse a buffer into which worker 0's values cannot be written."""
    for name, buffer in module.named_buffers():
        if why := _why_not_writable(buffer):
            raise PlanError(
                f"buffer {name} of the model is {why}, into which worker 0's values cannot be "
                "written; register a clone() of it that is dense, or set "
                "strategy.broadcast_buffers = False, and each worker keeps its own buffers"
            )


def _why_not_writable(buffer: Tensor) -> str:
    if buffer.layout != torch.strided:
        return f"of layout {str(buffer.layout).removeprefix('torch.')}"
    return "made under torch.inference_mode()" if buffer.is_inference() else ""


_DIFFERENT = (
    "the workers have different settings: {}; give the same settings on all workers",
    "the workers built different models: {}; build the same model from the same script and "
    "settings everywhere",
)


def checksum(terms: Terms) -> int:
    """A checksum of terms, equal for equal terms."""
    return zlib.crc32(repr(terms).encode())


def check_same_terms(stamps: Mapping[int, GradientStamp], terms: Terms, group: Group) -> None:
    """Raise unless the checksums of all workers are equal; the error names the difference.

    All workers have the same stamps, so all of them gather their terms or none.
    """
    if len({stamp.terms for stamp in stamps.values()}) <= 1:
        return
    gathered = group.gather_bytes(
        msgspec.json.encode(entries_of(terms)), "comparing the terms of the workers"
    )
    decoded = [msgspec.json.decode(data, type=list[Entry]) for data in gathered]
    difference = _difference(decoded) or "the difference is not known"
    raise DivergedError(
        f"the workers no longer train alike: {difference}; all must make the same steps, with the "
        "same settings"
    )


def _difference(gathered: Sequence[Sequence[Entry]]) -> str:
    """The first difference of a worker from worker 0; empty without one."""
    for index, entries in enumerate(gathered):
        if list(entries) != list(gathered[0]):
            return first_difference(gathered[0], entries, index)
    return ""


def entries_of(terms: Terms) -> list[Entry]:
    """Terms as entries that are compared one by one."""
    entries: list[Entry] = []
    for name, value in terms:
        if isinstance(value, Mapping):
            entries += [(f"{key} of {name}", repr(one)) for key, one in value.items()]
        else:
            entries.append((name, repr(value)))
    return entries


def describe(module: nn.Module) -> list[Entry]:
    """Name and kind of each parameter and buffer, in order."""
    entries = [
        (name, f"{_kind(p)}{'' if p.requires_grad else ', frozen'}")
        for name, p in module.named_parameters()
    ]
    return entries + [(name, f"buffer, {_kind(b)}") for name, b in module.named_buffers()]


def first_difference(zero: Sequence[Entry], other: Sequence[Entry], index: int) -> str:
    """A sentence about the first entry that differs from worker 0's."""
    for mine, theirs in zip(zero, other, strict=False):
        if mine[0] != theirs[0]:
            return f"worker 0 has {mine[0]} where worker {index} has {theirs[0]}"
        if mine != theirs:
            return f"{mine[0]} is {mine[1]} on worker 0, but {theirs[1]} on worker {index}"
    longer = zero if len(zero) > len(other) else other
    more, fewer = (0, index) if longer is zero else (index, 0)
    return f"worker {more} has {longer[min(len(zero), len(other))][0]}, worker {fewer} does not"


def warn_if_same_records(inputs: Any, group: Group) -> None:
    """Warn of two workers with equal first batches, which probably read the same records."""
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
    """A digest of the tensors of a batch; empty without tensors."""
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
