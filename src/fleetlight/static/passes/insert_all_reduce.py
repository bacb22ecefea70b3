# SPDX-License-Identifier: Apache-2.0
"""Inserts an all-reduce for each gradient, before the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import fx

from fleetlight.static.graph.aliases import looked_at
from fleetlight.static.graph.form import Form
from fleetlight.static.ops.reductions import REDUCE, REDUCED
from fleetlight.static.rewriting.gradient_layout import GradientLayout
from fleetlight.static.rewriting.nodes import NodeWriter, gradients_of, made_by
from fleetlight.static.rewriting.registry import PassRecord


@dataclasses.dataclass(frozen=True)
class InsertAllReduce:
    """All all-reduces start after backward, and end after the last has started."""

    name = "insert_all_reduce"

    def __call__(self, form: Form) -> Form:
        """The form with one all-reduce for each gradient."""
        graph, _ = form.copied()
        marks = gradients_of(graph)
        named = frozenset(form.fetches.values())
        if marks:
            with graph.inserting_before(_after_backward(marks)):
                rows = [_begin(mark, index, named) for index, mark in enumerate(marks)]
                for index, (mark, row) in enumerate(zip(marks, rows, strict=True)):
                    _end(mark, index, row)
        return form.rewritten(graph, f"{len(marks)} gradients, each reduced separately")


def _after_backward(marks: list[fx.Node]) -> fx.Node:
    """The first node after all gradients that is not a mark."""
    last = max(map(made_by, marks))
    node = max(last, min(marks))
    while node is last or node in marks:
        node = node.next
    return node


def _begin(mark: fx.Node, index: int, named: Collection[str]) -> fx.Node:
    """Start to reduce a gradient, or a copy if other nodes use it."""
    pen, gradient = NodeWriter(mark), made_by(mark)
    layout, is_alone = GradientLayout.of(gradient.meta["val"]), _is_alone(mark, named)
    row = layout.flat(pen, gradient)
    if layout.dense and not is_alone:
        row = pen.write(torch.ops.aten.clone.default, row)
    pen.write(REDUCE, row, index)
    return row


def _end(mark: fx.Node, index: int, row: fx.Node) -> None:
    """End the all-reduce, and move the mark after it."""
    pen, gradient = NodeWriter(mark), made_by(mark)
    back = pen.write(REDUCED, row, index)
    means = GradientLayout.of(gradient.meta["val"]).shaped(pen, row)
    mark.replace_input_with(gradient, means)
    max(back, means).append(mark)


def _is_alone(mark: fx.Node, named: Collection[str]) -> bool:
    """Whether a gradient has memory of its own, at which only its mark looks."""
    size = made_by(mark).meta["val"].numel()
    reader, node = mark, made_by(mark)
    while set(node.users) == {reader} and node.name not in named:
        source = looked_at(node)
        if source is None:
            return node.op != "placeholder" and bool(node.meta["val"].numel() == size)
        reader, node = node, source
    return False


PASS = PassRecord(
    InsertAllReduce.name,
    lambda request: InsertAllReduce() if request.reduction is not None else None,
    after=("gradient_merge", "sync_batch_norm"),
)
