# SPDX-License-Identifier: Apache-2.0
"""The content of a picture: boxes, arrows between them, and frames around modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from torch import fx, nn

from fleetlight.errors import counted
from fleetlight.static.drawing.levels import (
    ModuleLevel,
    computes_nothing,
    is_tensor,
    levels_of,
    names_of_operations,
    plain_name,
)
from fleetlight.static.drawing.text import bytes_text, short_name
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form, Sizes, plain
from fleetlight.static.graph.state import Slot
from fleetlight.static.ops.marks import GRADIENT
from fleetlight.static.rewriting.all_reduces import AllReduce, all_reduces_of, members_of

Kind = Literal["feed", "table", "forward", "loss", "backward", "overlapped", "bucket", "step"]
Flow = Literal["value", "kept", "gradient"]
#: more feeds or tables than these share boxes
_MAX_ENTRIES = 6
#: more kernels than these share a box
_MAX_STEPS = 4


@dataclasses.dataclass(frozen=True)
class PictureBox:
    """Some operations, or an input of the program; `full` is the tooltip."""

    name: str
    kind: Kind
    lines: tuple[str, ...]
    full: str = ""


@dataclasses.dataclass(frozen=True)
class PictureArrow:
    """A value from one box to another."""

    source: str
    target: str
    label: str = ""
    flow: Flow = "value"


@dataclasses.dataclass(frozen=True)
class PictureFrame:
    """Adjacent boxes of one module, by name."""

    title: str
    members: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Picture:
    """All boxes, arrows and frames; `beside` pairs each forward with its backward."""

    title: str
    lines: tuple[str, ...]
    boxes: tuple[PictureBox, ...]
    arrows: tuple[PictureArrow, ...]
    frames: tuple[PictureFrame, ...]
    beside: tuple[tuple[str, str], ...]


def picture_of(form: Form, model: nn.Module | None = None, optimizer: str = "") -> Picture:
    """The picture of a form; `model` gives the classes of modules."""
    return _Sketch(form, model, optimizer).picture()


def _counted(number: int, noun: str) -> str:
    return counted(number, noun, ",")


class _Sketch:
    """Reads a form once, and adds boxes and arrows in an order that depends on the form alone."""

    def __init__(self, form: Form, model: nn.Module | None, optimizer: str) -> None:
        self._form, self._model, self._optimizer = form, model, optimizer
        self._levels, self._sizes = levels_of(form.graph), Sizes(form)
        self._inputs = [node for node in form.graph.nodes if node.op == "placeholder"]
        self._marks = [node for node in form.graph.nodes if node.target is GRADIENT]
        #: the number of each operation's level
        self._level = {n: i for i, level in enumerate(self._levels) for n in level.forward}
        self._back = {n: i for i, level in enumerate(self._levels) for n in level.backward}
        self._boxes: list[PictureBox] = []
        self._arrows: list[PictureArrow] = []

    def picture(self) -> Picture:
        """The whole picture."""
        slots = self._slots_of_levels()
        titles = [self._add_level(n, slots.get(n, [])) for n in range(len(self._levels))]
        self._add_feeds()
        self._add_tables()
        for letter, place in (("f", self._level), ("b", self._back)):
            self._connect(letter, place)
        steps = self._add_steps()
        self._add_gradients(slots, steps, titles)
        beside = tuple((f"f{n}", f"b{n}") for n in sorted(set(self._back.values())))
        boxes, arrows = tuple(self._boxes), tuple(self._arrows)
        frames = tuple(self._frames())
        return Picture(self._title(), tuple(self._heading()), boxes, arrows, frames, beside)

    def _title(self) -> str:
        name = type(self._model).__name__ if self._model is not None else "Module"
        # several modules have a generated root
        name = "a program" if name == "Module" else name
        return f"Training step of {name}" if self._back else f"Forward of {name}"

    def _heading(self) -> Iterable[str]:
        held = [slot for slot in self._form.state if slot.kind == "parameter"]
        count = sum(slot.tensor.numel() for slot in held)
        parts = [
            _counted(sum(n.op == "call_function" for n in self._form.graph.nodes), "operation")
        ]
        if held:
            parts += [f"{count:,} parameters in {_counted(len(held), 'tensor')}", _bytes_of(held)]
        return [" · ".join(parts), *self._form.reports]

    # -- the forward, and backward beside it

    def _slots_of_levels(self) -> dict[int, list[Slot]]:
        """Parameters, at the first level that reads them."""
        found: dict[int, list[Slot]] = {}
        for slot, node in zip(self._form.state, self._inputs, strict=False):
            levels = self._levels_that_read(node)
            if slot.kind == "parameter" and levels:
                found.setdefault(min(levels), []).append(slot)
        return found

    def _levels_that_read(self, *nodes: fx.Node) -> set[int]:
        users = {user for node in nodes for user in node.users if user in self._level}
        return {self._level[user] for user in users if plain_name(user) != "sym_size"}

    def _add_level(self, number: int, slots: Sequence[Slot]) -> str:
        """The boxes of a level; returns its title."""
        level = self._levels[number]
        made = {node.name for node in level.forward}
        fetches = [name for name, node in self._form.fetches.items() if node in made]
        title, kind = self._called(level, slots, fetches)
        held = f"{sum(s.tensor.numel() for s in slots):,} parameters · {_bytes_of(slots)}"
        lines = [title, kind, _counted(len(level.forward), "op"), held if slots else ""]
        lines += [f"fetch {', '.join(fetches)}" if fetches else ""]
        is_loss = title == "loss"
        self._box(f"f{number}", "loss" if is_loss else "forward", lines, level.forward)
        if level.backward:
            trained = {mark.args[1] for mark in self._marks}
            count = sum(slot.name in trained for slot in slots)
            lines = [f"∂ {title}", _counted(len(level.backward), "op")]
            lines += [_counted(count, "gradient") if count else ""]
            self._box(f"b{number}", "loss" if is_loss else "backward", lines, level.backward)
            self._turn(number)
        return title

    def _turn(self, number: int) -> None:
        """Connect a forward to its backward: where that begins, or the saved values."""
        level = self._levels[number]
        read = {source for node in level.backward for source in node.all_input_nodes}
        kept = sum(node in read for node in level.forward)
        if number == max(self._back.values()):
            self._arrow(f"f{number}", f"b{number}", "backward begins")
        elif kept:
            self._arrow(f"f{number}", f"b{number}", f"{kept} kept", "kept")

    def _called(
        self, level: ModuleLevel, slots: Sequence[Slot], fetches: Sequence[str]
    ) -> tuple[str, str]:
        """The title of a level, and the class of its module or the names of its operations."""
        done = ", ".join(names_of_operations(level.forward)) or plain_name(level.forward[-1])
        if "loss" in fetches and not slots:
            return "loss", done
        if not level.path or self._is_within(level):
            return done, ""
        modules = dict(self._model.named_modules()) if self._model is not None else {}
        owner = {slot.name.rpartition(".")[0] for slot in slots}
        if level.path in modules:
            return level.path, type(modules[level.path]).__name__
        if len(owner) == 1 and "." not in level.path and owner != {level.path}:
            # the outermost module has the name of its class; a checkpoint may have another name
            return owner.pop() or level.path, level.path
        return level.path, done

    def _is_within(self, level: ModuleLevel) -> bool:
        """Whether a level has a module's own operations, between those of inner modules."""
        path, number = level.keys[0]
        if len(set(level.keys)) > 1:
            return False
        others = [other for other in self._levels if other is not level]
        return any(
            o.path.startswith(f"{path}.") or (number and _calls(o) > {number}) for o in others
        )

    def _group(self, level: ModuleLevel) -> str:
        """The module that contains a whole level."""
        if len(set(level.keys)) > 1:
            return ""
        return level.path if self._is_within(level) else level.path.rpartition(".")[0]

    def _frames(self) -> Iterable[PictureFrame]:
        backward = set(self._back.values())
        groups = groupby(range(len(self._levels)), lambda n: self._group(self._levels[n]))
        for title, found in groups:
            numbers = list(found)
            if title and len(numbers) > 1:
                back = [f"b{n}" for n in numbers if n in backward]
                yield PictureFrame(title, (*(f"f{n}" for n in numbers), *back))

    def _connect(self, letter: str, place: Mapping[fx.Node, int]) -> None:
        """Connect levels; the label is the shape of the largest value."""
        values: dict[tuple[int, int], list[fx.Node]] = {}
        for node, target in place.items():
            for source in node.all_input_nodes:
                if place.get(source, target) != target and is_tensor(source):
                    values.setdefault((place[source], target), []).append(source)
        for (start, end), nodes in sorted(values.items()):
            first = max(nodes, key=lambda node: node.meta["val"].dim())
            label = self._shape(first) if letter == "f" else ""
            self._arrow(f"{letter}{start}", f"{letter}{end}", label)

    def _shape(self, node: fx.Node) -> str:
        """`batch × 64 × 8 × 8`."""
        return " × ".join(map(self._sizes.text, node.meta["val"].shape)) or "one number"

    # -- inputs

    def _add_feeds(self) -> None:
        groups: dict[object, list[tuple[Feed, fx.Node]]] = {}
        feeds = self._form.feeds
        for feed, node in zip(feeds, self._inputs[len(self._form.state) :], strict=True):
            alike = (feed.shape, feed.dtype) if len(feeds) > _MAX_ENTRIES else feed.name
            groups.setdefault(alike, []).append((feed, node))
        split = self._form.split
        needed = {need.name for need in split.needs if isinstance(need, Feed)} if split else set()
        for number, group in enumerate(groups.values()):
            (feed, first), *others = group
            title = f"{feed.name} and {len(others)} more" if others else feed.name
            lines = (title, f"{plain(feed.dtype)}  {self._shape(first)}")
            full = "\n".join(str(feed) for feed, _ in group)
            self._boxes.append(PictureBox(f"x{number}", "feed", lines, full))
            for level in sorted(self._levels_that_read(*(node for _, node in group))):
                self._arrow(f"x{number}", f"f{level}")
            if needed & {feed.name for feed, _ in group}:
                for table in range(len(self._pulls())):
                    self._arrow(f"x{number}", f"t{table}")

    def _pulls(self) -> list[list[Any]]:
        """The pulls from parameter servers; many tables share a box."""
        pulls = [] if self._form.split is None else list(self._form.split.pulls)
        return [[pull] for pull in pulls] if len(pulls) <= _MAX_ENTRIES else [pulls]

    def _add_tables(self) -> None:
        node_of = dict(zip(map(id, self._form.state), self._inputs, strict=False))
        for number, group in enumerate(self._pulls()):
            title = f"pull {group[0].table}" if len(group) == 1 else f"pull {len(group)} tables"
            lines = (title, _counted(sum(len(pull.wanted) for pull in group), "lookup"))
            full = "\n".join(["rows from the parameter servers", *(pull.table for pull in group)])
            self._boxes.append(PictureBox(f"t{number}", "table", lines, full))
            nodes = [node_of[id(slot)] for pull in group for slot in pull.slots]
            for level in sorted(self._levels_that_read(*nodes)):
                self._arrow(f"t{number}", f"f{level}")

    # -- gradients

    def _add_steps(self) -> list[list[fx.Node]]:
        """Add boxes of the optimizer's step; return their operations, none for a step outside."""
        nodes = [n for n in self._form.graph.nodes if n.op == "call_function"]
        update = [n for n in nodes if n.meta.get("part") == "update"]
        update = [n for n in update if not short_name(n).startswith("fleetlight.reduce")]
        if not update:
            return self._step_outside() if self._marks else []
        title = f"step of {self._optimizer}" if self._optimizer else "optimizer's step"
        state = zip(self._inputs, self._form.state, strict=False)
        held = {node for node, slot in state if slot.kind == "parameter"}
        parts = _parted(update)
        for number, part in enumerate(parts):
            counts = names_of_operations(part)
            changed = {source for node in part for source in node.all_input_nodes} & held
            kernels = [name for name in counts if "fused" in name] or _by_frequency(counts)[:4]
            changes = f"changes {_counted(len(changed), 'parameter')}" if changed else ""
            lines = [title, ", ".join(kernels), _counted(len(part), "op"), changes]
            self._box(f"s{number}", "step", lines, part)
            if number:
                self._arrow(f"s{number - 1}", f"s{number}")
        return parts

    def _step_outside(self) -> list[list[fx.Node]]:
        """Add the box of a step by parameter servers or by the live optimizer."""
        tables = [] if self._form.split is None else list(self._form.split.pushes)
        pushed = f"push {', '.join(tables)}" if tables else ""
        dense = _counted(len(self._marks) - len(tables), "dense gradient")
        lines = ["step outside", pushed, _counted(len(tables), "table") if tables else "", dense]
        full = "parameter servers or a live optimizer take the gradients"
        self._boxes.append(PictureBox("s0", "step", _shown(lines), full))
        return [[]]

    def _add_gradients(
        self, slots: Mapping[int, Sequence[Slot]], steps: list[list[fx.Node]], titles: list[str]
    ) -> None:
        """Add the buckets between backward and the step; other gradients go there directly."""
        if not steps or not self._back:
            return
        times, owners = self._times(steps), self._owners(slots)
        members = members_of(self._form.graph)
        merged: dict[Any, list[AllReduce]] = {}
        for one in all_reduces_of(self._form.graph):
            how = tuple(f"{name}={value}" for name, value in sorted(one.begin.kwargs.items()))
            key = (max(-1, times[one.begin]), times[one.end], plain(one.value.dtype), how)
            merged.setdefault(key, []).append(one)
        reduced: set[str] = set()
        for number, ((issued, waited, dtype, how), found) in enumerate(merged.items()):
            names = sorted(str(m.args[1]) for one in found for m in members.get(one.index, ()))
            reduced.update(names)
            size = bytes_text(sum(one.bytes for one in found))
            after = f"∂ {titles[issued]}" if issued >= 0 else "backward"
            step = f"step {-waited}" if len(steps) > 1 else "the step"
            before = step if waited < 0 else f"the end of ∂ {titles[waited]}"
            lines = [f"{_counted(len(names), 'gradient')} · {size} · {dtype}", *how]
            lines += [_counted(len(found), "all-reduce"), f"begins after {after}"]
            lines += [f"ends before {before}"]
            kind: Kind = "overlapped" if issued >= 0 and issued > waited else "bucket"
            self._boxes.append(PictureBox(f"r{number}", kind, tuple(lines), "\n".join(names)))
            for level in sorted({owners[name] for name in names if name in owners}):
                self._arrow(f"b{level}", f"r{number}", flow="gradient")
            self._arrow(f"r{number}", f"s{max(0, -1 - waited)}", flow="gradient")
        alone = [str(mark.args[1]) for mark in self._marks if mark.args[1] not in reduced]
        for level in sorted({owners[name] for name in alone if name in owners}):
            self._arrow(f"b{level}", "s0", flow="gradient")

    def _owners(self, slots: Mapping[int, Sequence[Slot]]) -> dict[str, int]:
        """The level of each gradient: the nearest one with a backward."""
        owners = {slot.name: number for number, found in slots.items() for slot in found}
        node_of = dict(zip(map(id, self._form.state), self._inputs, strict=False))
        marks = {node.name: str(node.args[1]) for node in self._marks}
        if self._form.split is not None:
            for pull in self._form.split.pulls:
                name = marks.get(self._form.split.pushes.get(pull.table, ""))
                levels = self._levels_that_read(*(node_of[id(slot)] for slot in pull.slots))
                if name is not None and levels:
                    owners[name] = min(levels)
        back = sorted(set(self._back.values()))
        return {name: min(back, key=lambda n: (abs(n - o), -n)) for name, o in owners.items()}

    def _times(self, steps: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, int]:
        """How far the program is at each node: the level that backward has reached.

        `-1 - n` is after backward, before box `n` of the step.
        """
        graph = self._form.graph
        last = max((node for node in self._back if not computes_nothing(node)), default=None)
        times, now, is_after = {}, max(self._back.values()), last is None
        for node in graph.nodes:
            now = min(now, self._back.get(node, now))
            times[node] = -1 if is_after else now
            is_after = is_after or node is last
        box = {node: number for number, nodes in enumerate(steps) for node in nodes}
        following = len(steps) - 1
        for node in reversed(graph.nodes):
            following = min(following, box.get(node, following))
            if times[node] == -1:
                times[node] -= following
        return times

    # -- helpers

    def _box(self, name: str, kind: Kind, lines: Sequence[str], nodes: Sequence[fx.Node]) -> None:
        """A box whose tooltip counts its operations."""
        counts = names_of_operations(nodes)
        full = [f"{counts[name]} {name}" for name in _by_frequency(counts)]
        if passive := sum(map(computes_nothing, nodes)):
            full.append(f"{passive} views and casts")
        shown = _shown(lines)
        self._boxes.append(PictureBox(name, kind, shown, "\n".join([shown[0], *full])))

    def _arrow(self, source: str, target: str, label: str = "", flow: Flow = "value") -> None:
        self._arrows.append(PictureArrow(source, target, label, flow))


def _shown(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line for line in lines if line)


def _by_frequency(counts: Mapping[str, int]) -> list[str]:
    return sorted(counts, key=lambda name: (-counts[name], name))


def _bytes_of(slots: Iterable[Slot]) -> str:
    return bytes_text(sum(slot.tensor.numel() * slot.tensor.element_size() for slot in slots))


def _calls(level: ModuleLevel) -> set[int]:
    return {call.number for call in level.forward[0].meta.get("calls") or ()}


def _parted(update: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The parts of the step, one for each fused kernel, so one for each param group."""
    parts: list[list[fx.Node]] = [[]]
    for node in update:
        parts[-1].append(node)
        if "fused" in short_name(node):
            parts.append([])
    parts = [part for part in parts if part]
    if len(parts) > _MAX_STEPS:
        return [list(update)]
    if len(parts) > 1 and not any("fused" in short_name(node) for node in parts[-1]):
        parts[-2:] = [[*parts[-2], *parts[-1]]]
    return parts
