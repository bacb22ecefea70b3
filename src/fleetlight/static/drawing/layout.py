# SPDX-License-Identifier: Apache-2.0
"""Where everything of a picture stands: the forward goes down, and backward up beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fleetlight.static.drawing.around import MARGIN, Heading, frame
from fleetlight.static.drawing.blocks import Blocks, Stage
from fleetlight.static.drawing.lanes import Lanes
from fleetlight.static.drawing.scene import (
    PAD,
    SMALL,
    TITLE,
    Box,
    Line,
    Role,
    Scene,
    Text,
)
from fleetlight.static.drawing.tracks import Tracks
from fleetlight.static.drawing.words import counted, mib, rounded, width

#: widths of columns, and heights of their boxes
_FORWARD, _BACKWARD = 300.0, 190.0
_HEIGHT, _ENTRY = 46.0, 28.0
#: between boxes of a column, between entries, and between backward and step
_GAP, _SLIT, _WAIT, _BETWEEN = 32.0, 8.0, 92.0, 40.0
#: a frame around the modules of one module
_FRAME, _FRAME_PAD = 24.0, 9.0
_PILL = 17.0


def laid_out(blocks: Blocks, heading: Heading) -> Scene:
    """The scene of some blocks."""
    return _Sheet(blocks, heading).scene


class _Sheet:
    """Places columns from the left to the right, all from the same height."""

    def __init__(self, blocks: Blocks, heading: Heading) -> None:
        self._blocks, self.scene = blocks, Scene()
        self._heading = heading
        self._groups = _groups(blocks.stages)
        self._lanes = Lanes(blocks.travels)
        self._has_backward = [n for n, s in enumerate(blocks.stages) if s.backward]
        count = len(blocks.entries) + len(blocks.stages)
        self._tracks = Tracks(blocks.forward, range(count))
        # what is skipped where backward does nothing is no detour
        self._back_tracks = Tracks(blocks.backward, self._has_backward[::-1])
        self._top = self._height_of_top()
        self._edge = MARGIN + self._tracks.room
        self._x = self._edge + (_FRAME if self._groups else 0.0)
        between = _BETWEEN + self._back_tracks.room
        self._back_x = self._x + _FORWARD + between
        self._draw_all()

    def _height_of_top(self) -> float:
        """Where the first stage stands, below entries at the left and the step at the right."""
        entries = sum(_ENTRY + gap for gap in self._gaps_of_entries())
        steps = len(self._blocks.steps) * (_HEIGHT + _SLIT) + self._wait()
        return self._heading.bottom + 14.0 + max(entries, steps if self._blocks.steps else 0.0)

    def _gaps_of_entries(self) -> list[float]:
        """What is below each of them."""
        entries = self._blocks.entries
        return [
            _GAP if last or (entries[n + 1].is_table and not entries[n].is_table) else _SLIT
            for n, last in enumerate(n == len(entries) - 1 for n in range(len(entries)))
        ]

    def _wait(self) -> float:
        reduced = any(travel.reductions for travel in self._blocks.travels)
        return _WAIT if reduced else _GAP

    def _draw_all(self) -> None:
        self._column = {**self._entries(), **self._stages()}
        offset = len(self._blocks.entries)
        self._backward = {
            n: self._back_box(n, self._blocks.stages[n], self._column[offset + n])
            for n in self._has_backward
        }
        self._frames(offset)
        self._wires()
        self._turns(offset)
        self._right()
        self._fetches(offset)
        frame(self.scene, self._heading, self._top + _HEIGHT)

    # -- the forward

    def _entries(self) -> dict[int, Box]:
        gaps = self._gaps_of_entries()
        y = self._top - sum(_ENTRY + gap for gap in gaps)
        boxes = {}
        for number, (entry, gap) in enumerate(zip(self._blocks.entries, gaps, strict=True)):
            role: Role = "table" if entry.is_table else "feed"
            box = Box(self._x, y, _FORWARD, _ENTRY, role, entry.full)
            self._show(box, y + 18.5, entry.title, entry.label)
            boxes[number] = box
            y += _ENTRY + gap
        return boxes

    def _stages(self) -> dict[int, Box]:
        offset, boxes = len(self._blocks.entries), {}
        for number, stage in enumerate(self._blocks.stages):
            y = self._top + number * (_HEIGHT + _GAP)
            block = stage.forward
            role: Role = "loss" if block.title == "loss" else "forward"
            box = Box(self._x, y, _FORWARD, _HEIGHT, role, _full(stage))
            self._show(box, y + 19.0, self._title(number), block.kind)
            held = f"{rounded(stage.parameters)} parameters · {mib(stage.bytes)}"
            left = Text(0, 0, counted(block.operations, "op"))
            self.scene.line_of_two(box, y + 36.0, left, held if stage.parameters else "")
            boxes[offset + number] = box
        return boxes

    def _title(self, number: int) -> str:
        """Inside a frame, the frame says where it is."""
        stage = self._blocks.stages[number]
        title, start = stage.forward.title, f"{stage.group}."
        framed = any(first <= number <= last for _, first, last in self._groups)
        short = title.removeprefix(start)
        return short if framed and not short.isdecimal() else title

    def _show(self, box: Box, y: float, title: str, kind: str) -> None:
        self.scene.boxes.append(box)
        text = Text(0, 0, title, TITLE, bold=True, muted=False)
        self.scene.line_of_two(box, y, text, kind, ends="." in title)

    def _back_box(self, number: int, stage: Stage, twin: Box) -> Box:
        assert stage.backward is not None
        role: Role = "loss" if twin.role == "loss" else "backward"
        box = Box(self._back_x, twin.y, _BACKWARD, _HEIGHT, role, stage.backward.full)
        self._show(box, box.y + 19.0, f"∂ {self._title(number)}", "")
        gradients = counted(stage.gradients, "gradient") if stage.gradients else ""
        left = Text(0, 0, counted(stage.backward.operations, "op"))
        self.scene.line_of_two(box, box.y + 36.0, left, gradients)
        return box

    def _frames(self, offset: int) -> None:
        """Around modules of one module, with its name at the side."""
        for group, first, last in self._groups:
            top, bottom = self._column[offset + first], self._column[offset + last]
            x = self._x - _FRAME
            y, end = top.y - _FRAME_PAD, bottom.bottom + _FRAME_PAD
            right = self._back_x + _BACKWARD if self._has_backward else top.right
            panel = Box(x, y, right + _FRAME_PAD - x, end - y, "group", group)
            self.scene.panels.append(panel)
            room = panel.height - 2 * PAD
            shown = Text(x + 15.5, panel.middle, group, anchor="middle", upright=True)
            self.scene.write(shown, room, ends=True)

    # -- what flows

    def _wires(self) -> None:
        for wire in self._blocks.forward:
            if wire.target == wire.source + 1:
                start, end = self._column[wire.source], self._column[wire.target]
                self._straight(start, end, wire.full)
                label = Text(start.centre + 9.0, (start.bottom + end.y) / 2 + 3.5, wire.label)
                self.scene.write(label, start.right - start.centre - 9.0)
        self._tracks.draw(self.scene, self._column, self._edge)
        order = self._has_backward
        before = dict(zip(order[1:], order, strict=False))
        for wire in self._blocks.backward:
            if before.get(wire.source) == wire.target:
                self._straight(self._backward[wire.source], self._backward[wire.target], wire.full)
        self._back_tracks.draw(self.scene, self._backward, self._back_x)

    def _straight(self, start: Box, end: Box, full: str) -> None:
        leaving = start.bottom if start.y < end.y else start.y
        coming = end.y if start.y < end.y else end.bottom
        points = ((start.centre, leaving), (end.centre, coming))
        self.scene.lines.append(Line(points, "value", full))

    def _turns(self, offset: int) -> None:
        """From the forward to backward: the loss, and what else was kept."""
        for number, box in self._backward.items():
            twin, stage = self._column[offset + number], self._blocks.stages[number]
            points = ((twin.right, twin.middle), (box.x, box.middle))
            if number == self._has_backward[-1]:
                self.scene.lines.append(Line(points, "value", "backward begins"))
            elif stage.kept:
                full = f"{counted(stage.kept, 'value')} of the forward kept for backward"
                self.scene.lines.append(Line(points, "kept", full, arrow=False))

    def _right(self) -> None:
        """The step above, and what goes there."""
        room = max(_BACKWARD + self._lanes.room, _FORWARD)
        bottom = self._top - self._wait()
        for number, step in enumerate(self._blocks.steps):
            y = bottom - (number + 1) * (_HEIGHT + _SLIT) + _SLIT
            box = Box(self._back_x, y, room, _HEIGHT, "step", step.full)
            self._show(box, y + 19.0, step.title, step.kind)
            left = Text(0, 0, step.operations)
            self.scene.line_of_two(box, y + 36.0, left, step.changes)
        self._lanes.draw(self.scene, self._backward, self._top, bottom)

    def _fetches(self, offset: int) -> None:
        """Names of values below the box that makes them."""
        for number, stage in enumerate(self._blocks.stages):
            if not stage.fetches:
                continue
            box, told = self._column[offset + number], ", ".join(stage.fetches)
            room = _FORWARD / 2 - 10.0
            wide = min(room, width(told, SMALL) + 2 * 8.0)
            pill = Box(
                box.x, box.bottom + (_GAP - _PILL) / 2, wide, _PILL, "fetch", f"fetch {told}"
            )
            self.scene.boxes.append(pill)
            text = Text(pill.centre, pill.y + 12.5, told, muted=False, anchor="middle")
            self.scene.write(text, wide - 8.0)


def _groups(stages: Sequence[Stage]) -> list[tuple[str, int, int]]:
    """Neighbours that belong to one module: its name, the first and the last of them."""
    found = []
    for group, members in groupby(range(len(stages)), lambda number: stages[number].group):
        numbers = list(members)
        if group and len(numbers) > 1:
            found.append((group, numbers[0], numbers[-1]))
    return found


def _full(stage: Stage) -> str:
    if not stage.parameters:
        return stage.forward.full
    return f"{stage.forward.full}\n{stage.parameters:,} parameters, {mib(stage.bytes)}"
