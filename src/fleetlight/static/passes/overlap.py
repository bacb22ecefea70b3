# SPDX-License-Identifier: Apache-2.0
"""Overlaps all-reduces with backward: they start as early and end as late as possible."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from torch import fx

from fleetlight.static.graph.aliases import Memory
from fleetlight.static.graph.form import Form
from fleetlight.static.ops.reductions import REDUCE, REDUCED
from fleetlight.static.rewriting.all_reduces import AllReduce, all_reduces_of, is_carried
from fleetlight.static.rewriting.registry import PassRecord


@dataclasses.dataclass(frozen=True)
class Overlap:
    """An all-reduce starts after its last gradient and ends before the first use of its means."""

    name = "overlap"

    def __call__(self, form: Form) -> Form:
        """The form in another order; the order of starts and of ends stays."""
        graph, _ = form.copied()
        reductions = all_reduces_of(graph)
        _hoist(graph, [reduction.begin for reduction in reductions])
        _sink(graph, [reduction.end for reduction in reductions])
        _tie(reductions)
        early, count = _early(graph, reductions), len(reductions)
        return form.rewritten(graph, f"{early} of {count} all-reduces begin before backward ends")


def _early(graph: fx.Graph, reductions: list[AllReduce]) -> int:
    """The number of all-reduces that start before the last derivative."""
    begins = [r.begin for r in reductions if _part(r.begin) == "backward"]
    computing = [n for n in graph.nodes if _is_derivative(n) and n < max(begins, default=n)]
    return sum(begin < last for last in computing[-1:] for begin in begins)


def _hoist(graph: fx.Graph, begins: list[fx.Node]) -> None:
    """Move starts, and the nodes that only move data to them, after the last node they need."""
    memory, needed = Memory(graph), dict[fx.Node, fx.Node]()
    carried = _carried(begins, memory.before)
    previous: list[fx.Node] = []
    for node in graph.nodes:
        if node in carried:
            last = max(needed.get(n, n) for n in (*memory.before(node), *previous))
            if last.op != "placeholder":
                needed[node] = last
            if node.target is REDUCE:
                previous = [node]
    for node, last in reversed(needed.items()):
        last.append(node)


def _sink(graph: fx.Graph, ends: list[fx.Node]) -> None:
    """Move ends, and the nodes that only move data from them, before their first user."""
    memory, needing = Memory(graph), dict[fx.Node, fx.Node]()
    carried = _carried(ends, memory.after)
    following: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node in carried:
            users = [needing.get(n, n) for n in (*memory.after(node), *following)]
            if users:
                needing[node] = min(users)
            if node.target is REDUCED:
                following = [node]
    for node, first in reversed(needing.items()):
        first.prepend(node)


def _tie(reductions: list[AllReduce]) -> None:
    """Make each start and end depend on the previous one, which fixes their order."""
    steps = [*(r.begin for r in reductions), *(r.end for r in reductions)]
    for before, node in itertools.pairwise(steps):
        node.args = (*node.args[:2], before.args[0])


def _carried(
    nodes: Iterable[fx.Node], adjacent: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """These nodes, and the nodes next to them that only move data."""
    found = set(nodes)
    pending = list(found)
    while pending:
        new = {n for n in adjacent(pending.pop()) if is_carried(n)} - found
        found |= new
        pending += new
    return found


def _is_derivative(node: fx.Node) -> bool:
    moved = is_carried(node) or node.target in (REDUCE, REDUCED)
    return node.op == "call_function" and _part(node) == "backward" and not moved


def _part(node: fx.Node) -> str:
    return str(node.meta.get("part", "forward"))


PASS = PassRecord(
    Overlap.name,
    lambda request: Overlap() if request.reduction is not None else None,
    after=("fuse_all_reduce", "hierarchical", "narrow"),
)
