# SPDX-License-Identifier: Apache-2.0
"""What a picture of a program shows, without saying where: levels, what flows, and the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from fleetlight.static.drawing.entries import Entry, Wire, entries_of, shape_of
from fleetlight.static.drawing.levels import (
    Level,
    is_tensor,
    levels_of,
    looks,
    names_of_operations,
    plain_name,
)
from fleetlight.static.drawing.steps import Step, steps_of
from fleetlight.static.drawing.travels import Travel, travels_of
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.sizes import Sizes
from fleetlight.static.graph.state import Slot


@dataclasses.dataclass(frozen=True)
class Block:
    """Some operations: those of a module in the forward, or its backward."""

    title: str
    #: the class of the module, or what the operations are
    kind: str
    operations: int
    #: everything there is to know
    full: str


@dataclasses.dataclass(frozen=True)
class Stage:
    """What stands at one height: a forward block and its backward."""

    forward: Block
    backward: Block | None
    #: the module that this one and its neighbours belong to
    group: str
    parameters: int
    bytes: int
    #: how many of its parameters have gradients
    gradients: int
    #: names by which its values can be fetched
    fetches: tuple[str, ...]
    #: values that backward needs from the forward
    kept: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A program as one looks at it."""

    entries: tuple[Entry, ...]
    stages: tuple[Stage, ...]
    #: of entries and stages, counted together
    forward: tuple[Wire, ...]
    #: of stages
    backward: tuple[Wire, ...]
    #: gradients on their way from backward to the step
    travels: tuple[Travel, ...]
    steps: tuple[Step, ...]
    operations: int
    parameters: int
    tensors: int
    bytes: int


def blocks_of(form: Form, kinds: Mapping[str, str] | None = None, optimizer: str = "") -> Blocks:
    """The blocks of a form; `kinds` are the classes of modules by their paths."""
    levels, sizes = levels_of(form.graph), Sizes(form)
    place = {node: n for n, level in enumerate(levels) for node in level.forward}
    back = {node: n for n, level in enumerate(levels) for node in level.backward}
    owned = _owned(form, place)
    names = {s.name: n for n, slots in owned.items() for s in slots} | _tables(form, place)
    steps = steps_of(form, optimizer)
    travels = travels_of(form, back, names, [step.nodes for step in steps])
    trained = {name for travel in travels for name in travel.names}
    held = [slot for slot in form.state if slot.kind == "parameter"]
    entries, inner = entries_of(form, place, sizes)
    return Blocks(
        entries,
        tuple(
            _stage(form, levels, number, owned.get(number, []), trained, kinds or {})
            for number in range(len(levels))
        ),
        (*inner, *_wires(place, sizes, len(entries))),
        _wires(back, sizes),
        travels,
        steps,
        sum(node.op == "call_function" for node in form.graph.nodes),
        sum(slot.tensor.numel() for slot in held),
        len(held),
        size_of(held),
    )


def _owned(form: Form, place: Mapping[fx.Node, int]) -> dict[int, list[Slot]]:
    """Parameters, at the first stage that reads them."""
    found: dict[int, list[Slot]] = {}
    for slot, node in zip(form.state, form.graph.nodes, strict=False):
        stages = [place[user] for user in node.users if user in place]
        if slot.kind == "parameter" and stages:
            found.setdefault(min(stages), []).append(slot)
    return found


def _tables(form: Form, place: Mapping[fx.Node, int]) -> dict[str, int]:
    """Names of gradients that are pushed, by the first stage that reads rows of the table."""
    if form.split is None:
        return {}
    node_of = {node.name: node for node in form.graph.nodes}
    inputs = dict(zip((id(slot) for slot in form.state), form.graph.nodes, strict=False))
    found = {}
    for pull in form.split.pulls:
        mark = node_of.get(form.split.pushes.get(pull.table, ""))
        stages = [place[user] for s in pull.slots for user in inputs[id(s)].users if user in place]
        if mark is not None and stages:
            found[str(mark.args[1])] = min(stages)
    return found


def size_of(slots: Iterable[Slot]) -> int:
    """Bytes of tensors."""
    return sum(slot.tensor.numel() * slot.tensor.element_size() for slot in slots)


def _stage(
    form: Form,
    levels: Sequence[Level],
    number: int,
    slots: Sequence[Slot],
    trained: set[str],
    kinds: Mapping[str, str],
) -> Stage:
    level = levels[number]
    fetches = tuple(name for name, node in form.fetches.items() if node in _names(level.forward))
    title, kind = _called(level, levels, slots, fetches, kinds)
    forward = Block(title, kind, len(level.forward), _told(title, kind, level.forward))
    backward = None
    if level.backward:
        told = _told(f"backward of {title}", kind, level.backward)
        backward = Block(title, kind, len(level.backward), told)
    read = {source for node in level.backward for source in node.all_input_nodes}
    return Stage(
        forward,
        backward,
        _group(level, levels),
        sum(slot.tensor.numel() for slot in slots),
        size_of(slots),
        sum(slot.name in trained for slot in slots),
        fetches,
        sum(node in read for node in level.forward),
    )


def _names(nodes: Iterable[fx.Node]) -> set[str]:
    return {node.name for node in nodes}


def _called(
    level: Level,
    levels: Sequence[Level],
    slots: Sequence[Slot],
    fetches: Sequence[str],
    kinds: Mapping[str, str],
) -> tuple[str, str]:
    """What a stage is called, and of what kind it is."""
    done = ", ".join(names_of_operations(level.forward)) or plain_name(level.forward[-1])
    if "loss" in fetches and not slots:
        return "loss", done
    if level.path and not _is_within(level, levels):
        owner = {slot.name.rpartition(".")[0] for slot in slots}
        kind = kinds.get(level.path, "")
        if not kind and len(owner) == 1 and "." not in level.path and owner != {level.path}:
            # the outermost module is called by its class; a checkpoint may have a name for it
            return owner.pop() or level.path, level.path
        return level.path, kind or done
    return done, ""


def _group(level: Level, levels: Sequence[Level]) -> str:
    """The module that all of a level is in."""
    if len(set(level.keys)) > 1:
        return ""
    return level.path if _is_within(level, levels) else level.path.rpartition(".")[0]


def _is_within(level: Level, levels: Sequence[Level]) -> bool:
    """Whether it is what a module does itself, between the modules within."""
    path, number = level.keys[0]
    if len(set(level.keys)) > 1:
        return False
    return any(
        other.path.startswith(f"{path}.") or (number and _calls(other) > {number})
        for other in levels
        if other is not level
    )


def _calls(level: Level) -> set[int]:
    calls = level.forward[0].meta.get("calls") or ()
    return {call.number for call in calls}


def _told(title: str, kind: str, nodes: Sequence[fx.Node]) -> str:
    counts = names_of_operations(nodes)
    looking = sum(map(looks, nodes))
    often = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{count} {name}" for name, count in often] + [f"{looking} views and casts"] * bool(
        looking
    )
    return "\n".join([f"{title}  {kind}".rstrip(), *lines])


def _wires(place: Mapping[fx.Node, int], sizes: Sizes, before: int = 0) -> tuple[Wire, ...]:
    """Between stages, whose numbers begin at `before`: a value that goes there, and all of them."""
    values: dict[tuple[int, int], dict[str, fx.Node]] = {}
    for node, target in place.items():
        for source in node.all_input_nodes:
            if source in place and place[source] != target and is_tensor(source):
                values.setdefault((place[source], target), {})[source.name] = source
    wires = []
    for (start, end), nodes in sorted(values.items()):
        first = max(nodes.values(), key=lambda node: node.meta["val"].dim())
        full = "\n".join(f"{name}: {sizes.value(n.meta['val'])}" for name, n in nodes.items())
        wires.append(Wire(before + start, before + end, shape_of(first, sizes), full))
    return tuple(wires)
