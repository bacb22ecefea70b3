# SPDX-License-Identifier: Apache-2.0
"""Pictures of programs: blocks of a form, where they stand, and the SVG of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from fleetlight.errors import ConfigError
from fleetlight.static.drawing.around import Heading
from fleetlight.static.drawing.blocks import Blocks, blocks_of
from fleetlight.static.drawing.layout import laid_out
from fleetlight.static.drawing.svg import svg_of
from fleetlight.static.drawing.words import counted, mib
from fleetlight.static.graph.form import Form

SUFFIX = ".svg"


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture; notebooks show it."""

    svg: str
    title: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Drawing of {self.title}, {len(self.svg):,} characters of SVG"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that browsers show."""
        place(path).write_text(self.svg, encoding="utf-8")


def place(path: str | os.PathLike[str]) -> Path:
    """Where a picture is to be written; an error where it could not be."""
    where = Path(path)
    if where.suffix.lower() != SUFFIX:
        raise ConfigError(
            f"draw: got the path {str(where)!r}, expected one that ends in {SUFFIX}: the picture "
            "is SVG, which browsers show and can print as PDF"
        )
    if not where.parent.is_dir():
        raise ConfigError(f"draw: the folder {str(where.parent)!r} does not exist; make it first")
    return where


def drawing_of(
    form: Form, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Drawing:
    """The picture of a form; a model says of what classes its modules are."""
    stepped = "" if optimizer is None else type(optimizer).__name__
    blocks = blocks_of(form, _kinds(model), stepped)
    title = _title(blocks, model)
    return Drawing(svg_of(laid_out(blocks, Heading(title, tuple(_lines(form, blocks))))), title)


def _kinds(model: nn.Module | None) -> Mapping[str, str]:
    if model is None:
        return {}
    return {path: type(module).__name__ for path, module in model.named_modules() if path}


def _title(blocks: Blocks, model: nn.Module | None) -> str:
    """What it is a picture of."""
    trains = any(stage.backward for stage in blocks.stages)
    name = type(model).__name__ if model is not None else "a program"
    # several modules have a root that nobody has written
    name = "a program" if name == "Module" else name
    return f"Training step of {name}" if trains else f"Forward of {name}"


def _lines(form: Form, blocks: Blocks) -> Iterator[str]:
    held = f"{blocks.parameters:,} parameters in {counted(blocks.tensors, 'tensor')}"
    size = f", {mib(blocks.bytes)}"
    operations = counted(blocks.operations, "operation")
    yield f"{operations} · {held}{size}" if blocks.tensors else operations
    yield from form.reports
