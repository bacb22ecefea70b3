# SPDX-License-Identifier: Apache-2.0
"""Groups of operations in a picture: by module, at a depth that leaves few groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import fx

from fleetlight.static.drawing.text import short_name
from fleetlight.static.ops.marks import GRADIENT
from fleetlight.static.ops.reductions import REDUCE, REDUCED
from fleetlight.static.rewriting.all_reduces import all_reduces_of, is_carried

#: the largest number of levels in a readable picture
MAX_LEVELS = 40
#: fewer levels show too little
FEW = 4
#: views, casts and copies
_VIEWS = frozenset(
    (
        *("getitem", "detach", "t", "transpose", "permute", "view", "_unsafe_view", "reshape"),
        *("expand", "unsqueeze", "squeeze", "slice", "select", "alias", "empty_like", "sym_size"),
        *("_to_copy", "clone"),
        *("fleetlight.gradient", "fleetlight.unless_testing", "fleetlight.laid_out"),
    )
)
#: the path of a module, and the number of its call
Key = tuple[str, int]


@dataclasses.dataclass(eq=False)
class ModuleLevel:
    """Consecutive operations of the forward, and their derivatives."""

    keys: tuple[Key, ...]
    forward: list[fx.Node]
    backward: list[fx.Node] = dataclasses.field(default_factory=list)

    @property
    def path(self) -> str:
        """The module, `0 … 3` for several, empty outside all modules."""
        first, last = self.keys[0][0], self.keys[-1][0]
        return first if first == last else f"{first} … {last}"


def levels_of(graph: fx.Graph, most: int = MAX_LEVELS) -> list[ModuleLevel]:
    """The levels in order, each with its operations of backward."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    forward = [node for node in calls if node.meta.get("part", "forward") == "forward"]
    levels = _few_levels(forward, most)
    carried = carried_of(graph)
    back = [node for node in calls if node.meta.get("part") == "backward" and node not in carried]
    _add_backward(levels, back)
    return levels


def carried_of(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that move gradients into buckets and back."""
    reductions = all_reduces_of(graph)
    found = {node for node in graph.nodes if node.target in (REDUCE, REDUCED, GRADIENT)}
    found |= {user for one in reductions for user in one.bucket.users if one.end < user}
    for node in graph.nodes:
        if node.op != "placeholder" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    buckets = {one.bucket for one in reductions}
    for node in reversed(graph.nodes):
        ends = node in buckets or (node.users and found.issuperset(node.users))
        if ends and is_carried(node) and not path_of(node):
            found.add(node)
    return found


def _few_levels(forward: Sequence[fx.Node], most: int) -> list[ModuleLevel]:
    """The levels at the largest depth that leaves few of them."""
    if not any(map(path_of, forward)):
        return _folded(_by_operations(forward), most)
    best: list[ModuleLevel] = []
    for depth in range(1, 1 + max(path_of(node).count(".") + 1 for node in forward)):
        found = _runs(forward, lambda node, depth=depth: key_of(node, depth))  # type: ignore[misc]
        if len(found) > most:
            return best if len(best) >= FEW else _folded(found, most)
        best = found
    return best


def path_of(node: fx.Node) -> str:
    """The module that a node belongs to."""
    path: str = node.meta.get("module") or ""
    return path


def key_of(node: fx.Node, depth: int) -> Key:
    """The module at some depth, and the number of its call."""
    path = _to_depth(path_of(node), depth)
    calls = node.meta.get("calls") or ()
    return path, next((c.number for c in calls if _to_depth(c.path, depth) == path), 0)


def _to_depth(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _runs(nodes: Iterable[fx.Node], key: Callable[[fx.Node], Key]) -> list[ModuleLevel]:
    return [ModuleLevel((name,), list(run)) for name, run in groupby(nodes, key)]


def _by_operations(nodes: Iterable[fx.Node]) -> list[ModuleLevel]:
    """Levels without modules: each operation with its views."""
    levels: list[ModuleLevel] = []
    for node in nodes:
        if levels and (computes_nothing(node) or all(map(computes_nothing, levels[-1].forward))):
            levels[-1].forward.append(node)
        else:
            levels.append(ModuleLevel((("", 0),), [node]))
    return levels


def computes_nothing(node: fx.Node) -> bool:
    """Whether an operation computes nothing."""
    return short_name(node) in _VIEWS


def _folded(levels: list[ModuleLevel], most: int) -> list[ModuleLevel]:
    """Merge adjacent levels until there are at most `most`."""
    size = -(-len(levels) // most) if levels else 1
    parts = [levels[start : start + size] for start in range(0, len(levels), size)]
    return [
        ModuleLevel(
            tuple(key for level in part for key in level.keys),
            [node for level in part for node in level.forward],
        )
        for part in parts
    ]


def _add_backward(levels: list[ModuleLevel], backward: Iterable[fx.Node]) -> None:
    """Add each operation of backward to the level of its forward."""
    if not levels:
        return
    place = {node: number for number, level in enumerate(levels) for node in level.forward}
    depth = max(key[0].count(".") + 1 for level in levels for key in level.keys)
    known: dict[Key, list[int]] = {}
    derivatives: dict[int | None, int] = {}
    for number, level in enumerate(levels):
        for key in dict.fromkeys(level.keys):
            known.setdefault(key, []).append(number)
        for node in level.forward:
            derivatives.setdefault(node.meta.get("derivative"), number)
    derivatives.pop(None, None)
    place |= _read_at_one(place)
    now = len(levels) - 1
    for node in backward:
        level_of = derivatives.get(node.meta.get("derivative"))
        if level_of is None:
            sources = [source for source in node.all_input_nodes if source in place]
            read = [place[source] for source in sources if plain_name(source) != "sym_size"]
            level_of = _likely(node, known.get(key_of(node, depth), []), read, now)
        place[node] = level_of
        levels[level_of].backward.append(node)
        if not computes_nothing(node):
            now = min(now, level_of)


def _read_at_one(place: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Inputs of the program that the forward reads at one level only."""
    found: dict[fx.Node, set[int]] = {}
    for node, number in place.items():
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                found.setdefault(source, set()).add(number)
    return {node: min(numbers) for node, numbers in found.items() if len(numbers) == 1}


def _likely(node: fx.Node, candidates: list[int], read: list[int], now: int) -> int:
    """Where the program does not know (it was loaded, or a pass wrote this): by what there is.

    Of a module that is called once its level; or else the last that has not been left yet.
    """
    if len(candidates) == 1 and path_of(node):
        return candidates[0]
    seen = [number for number in candidates if number in read and number <= now]
    if not seen and not path_of(node) and read:
        # nodes that passes have added are outside all modules as well
        return min(read)
    return max(seen or [c for c in candidates if c <= now] or [min(candidates, default=now)])


def names_of_operations(nodes: Iterable[fx.Node]) -> dict[str, int]:
    """The names of operations with their counts, without views."""
    counts: dict[str, int] = {}
    for node in nodes:
        if not computes_nothing(node):
            name = plain_name(node)
            counts[name] = counts.get(name, 0) + 1
    return counts


def plain_name(node: fx.Node) -> str:
    """`add` for `aten.add_.Tensor`."""
    return short_name(node).removeprefix("fleetlight.").strip("_")


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)
