# SPDX-License-Identifier: Apache-2.0
"""The way of gradients from backward to the step: alone, or in buckets that are reduced."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from fleetlight.static.drawing.levels import looks
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.marks import GRADIENT
from fleetlight.static.graph.reductions import REDUCED
from fleetlight.static.graph.sizes import plain
from fleetlight.static.passes.all_reduces import AllReduce, all_reduces_of

#: behind backward, or before the first operation of the step; lower numbers are later
BEHIND = -1


@dataclasses.dataclass(frozen=True)
class Travel:
    """Gradients that go together. Heights are numbers of stages, counted down as backward goes on.

    `BEHIND - n` is before block `n` of the step.
    """

    names: tuple[str, ...]
    #: the stages that they come from
    stages: tuple[int, ...]
    #: what goes to the other workers; 0 where nothing does
    bytes: int
    #: how many reductions
    reductions: int
    issued: int
    waited: int
    dtype: str = ""


def travels_of(
    form: Form,
    back: Mapping[fx.Node, int],
    owners: Mapping[str, int],
    steps: Sequence[Collection[fx.Node]],
) -> tuple[Travel, ...]:
    """In the order in which they begin; those that are reduced nowhere come last."""
    marks = [node for node in form.graph.nodes if node.target is GRADIENT]
    times, owners = _times(form.graph, back, steps), _with_backward(owners, set(back.values()))
    found = [_travel(one, times, owners) for one in all_reduces_of(form.graph)]
    reduced = {name for travel in found for name in travel.names}
    rest = tuple(str(m.args[1]) for m in marks if m.args[1] not in reduced)
    alone = [Travel(rest, _stages(rest, owners), 0, 0, BEHIND, BEHIND)] if rest else []
    return (*_merged(found), *alone)


def _with_backward(owners: Mapping[str, int], stages: set[int]) -> dict[str, int]:
    """Where gradients come from: the nearest stage that has a backward."""
    return {
        name: min(stages, key=lambda stage: (abs(stage - owner), -stage))
        for name, owner in owners.items()
        if stages
    }


def _times(
    graph: fx.Graph, back: Mapping[fx.Node, int], steps: Sequence[Collection[fx.Node]]
) -> dict[fx.Node, int]:
    """How far each node is: the stage that backward has reached, or the next block of the step."""
    last = max((node for node in back if not looks(node)), default=None)
    block = {node: number for number, nodes in enumerate(steps) for node in nodes}
    now, times = max(back.values(), default=0), {}
    behind = last is None
    for node in graph.nodes:
        now = min(now, back.get(node, now))
        times[node] = BEHIND if behind else now
        behind = behind or node is last
    following = len(steps) - 1
    for node in reversed(graph.nodes):
        following = min(following, block.get(node, following))
        if times[node] == BEHIND:
            times[node] = BEHIND - max(0, following)
    return times


def _travel(one: AllReduce, times: Mapping[fx.Node, int], owners: Mapping[str, int]) -> Travel:
    names = tuple(_gradients(one))
    return Travel(
        names,
        _stages(names, owners),
        one.bytes,
        1,
        max(BEHIND, times[one.begin]),
        times[one.end],
        plain(one.value.dtype),
    )


def _gradients(one: AllReduce) -> list[str]:
    """Names on the marks of what a bucket is cut into when it is back."""
    return sorted(_marked(one.bucket, one.end))


def _marked(node: fx.Node, end: fx.Node) -> set[str]:
    names: set[str] = set()
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.target is GRADIENT:
                names.add(str(user.args[1]))
            elif end < user and user not in seen and user.target is not REDUCED:
                seen.add(user)
                todo.append(user)
    return names


def _stages(names: Sequence[str], owners: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sorted({owners[name] for name in names if name in owners}))


def _merged(travels: Sequence[Travel]) -> list[Travel]:
    """Those that begin and end at the same heights are one bar."""
    together: dict[tuple[int, int, str], Travel] = {}
    for travel in travels:
        key = (travel.issued, travel.waited, travel.dtype)
        before = together.get(key)
        together[key] = travel if before is None else _both(before, travel)
    return list(together.values())


def _both(one: Travel, other: Travel) -> Travel:
    return dataclasses.replace(
        one,
        names=(*one.names, *other.names),
        stages=tuple(sorted({*one.stages, *other.stages})),
        bytes=one.bytes + other.bytes,
        reductions=one.reductions + other.reductions,
    )
