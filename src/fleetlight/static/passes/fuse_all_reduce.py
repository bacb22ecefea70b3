# SPDX-License-Identifier: Apache-2.0
"""Fuses all-reduces: few large buckets cost less than many small ones."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch import fx

from fleetlight.collective.buckets import MIB, BucketLimits, assign
from fleetlight.static.graph.form import Form
from fleetlight.static.ops.reductions import REDUCE, REDUCED
from fleetlight.static.rewriting.all_reduces import AllReduce, all_reduces_of
from fleetlight.static.rewriting.nodes import NodeWriter
from fleetlight.static.rewriting.registry import PassRecord, PassRequest

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class FuseAllReduce:
    """Fuses consecutive all-reduces up to the limits of a bucket.

    All members of a bucket have the same type, hierarchy and codec.
    """

    limits: BucketLimits = dataclasses.field(default_factory=BucketLimits)
    name = "fuse_all_reduce"

    def __call__(self, form: Form) -> Form:
        """The form with one all-reduce for each bucket, which end in their order."""
        graph, _ = form.copied()
        singles = all_reduces_of(graph)
        kinds = [single.kind for single in singles]
        buckets = assign([single.bytes for single in singles], kinds, self.limits)
        first_end = min((single.end for single in singles), default=None)
        for index, members in enumerate(buckets):
            assert first_end is not None
            _fuse([singles[member] for member in members], index, first_end)
        for single in singles:
            _erase(single)
        return form.rewritten(graph, self._report(len(singles), len(buckets)))

    def _report(self, before: int, after: int) -> str:
        size = self.limits.bytes / MIB
        return f"all_reduce: {before} -> {after}" + (f" ({size:g} MiB)" if size >= 0.01 else "")


def _fuse(singles: Sequence[AllReduce], index: int, first_end: fx.Node) -> None:
    """Replace several all-reduces by one, which starts at the last of them."""
    last = singles[-1].begin
    pen = NodeWriter(last)
    with last.graph.inserting_before(last):
        rows = [_source(single.bucket) for single in singles]
        bucket = pen.write(_aten.cat.default, rows) if len(rows) > 1 else singles[0].bucket
        pen.write(REDUCE, bucket, index, **last.kwargs)
    with last.graph.inserting_before(first_end):
        pen.write(REDUCED, bucket, index)
        pieces = _pieces(pen, bucket, [single.value.numel() for single in singles])
    for single, piece in zip(singles, pieces, strict=True):
        single.give(piece)


def _source(row: fx.Node) -> fx.Node:
    """The original of a copy: the bucket is a copy itself."""
    return row.all_input_nodes[0] if _is_copy(row) else row


def _is_copy(row: fx.Node) -> bool:
    is_clone = row.target is _aten.clone.default
    return is_clone and bool(row.all_input_nodes[0].meta["val"].dim() == 1)


def _pieces(pen: NodeWriter, bucket: fx.Node, sizes: list[int]) -> list[fx.Node]:
    """The parts of a bucket."""
    if len(sizes) == 1:
        return [bucket]
    split = pen.write(_aten.split_with_sizes.default, bucket, sizes)
    return [pen.write(operator.getitem, split, place) for place in range(len(sizes))]


def _erase(single: AllReduce) -> None:
    row = single.bucket
    row.graph.erase_node(single.end)
    row.graph.erase_node(single.begin)
    if _is_copy(row) and not row.users:
        row.graph.erase_node(row)


def _wanted(request: PassRequest) -> FuseAllReduce | None:
    if request.reduction is None or not request.strategy.fuse_all_reduce_ops:
        return None
    return FuseAllReduce(request.reduction.limits)


PASS = PassRecord(FuseAllReduce.name, _wanted, after=("insert_all_reduce", "compress"))
