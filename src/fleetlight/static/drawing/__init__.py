# SPDX-License-Identifier: Apache-2.0
"""Pictures of programs: their content, their text, and the files that Graphviz makes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch import nn

from fleetlight.errors import ConfigError, PlanError
from fleetlight.static.drawing.picture import Picture, picture_of
from fleetlight.static.drawing.writers import dot_of, mermaid_of
from fleetlight.static.graph.form import Form

#: files of text, and those that Graphviz makes
_TEXTS = {".dot": dot_of, ".mmd": mermaid_of}
_LAID_OUT = (".svg", ".png", ".pdf")


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture; notebooks show it as SVG if Graphviz is installed, else as Mermaid."""

    picture: Picture

    @property
    def dot(self) -> str:
        """The picture in the language of Graphviz."""
        return dot_of(self.picture)

    @property
    def mermaid(self) -> str:
        """The picture as a Mermaid flowchart, which GitHub and many notebooks show."""
        return mermaid_of(self.picture)

    @property
    def svg(self) -> str:
        """The picture as SVG, which Graphviz makes."""
        return _laid_out(self.dot, ".svg").decode()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        if shutil.which("dot"):
            return {"image/svg+xml": self.svg}
        return {"text/markdown": f"```mermaid\n{self.mermaid}```\n"}

    def __repr__(self) -> str:
        return f"Drawing of {self.picture.title}, {len(self.picture.boxes)} boxes"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file in the format of its suffix."""
        where = checked_path(path)
        suffix = where.suffix.lower()
        if suffix in _TEXTS:
            where.write_text(_TEXTS[suffix](self.picture), encoding="utf-8")
        else:
            where.write_bytes(_laid_out(self.dot, suffix))


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path of a picture; an error if it cannot be written."""
    where = Path(path)
    suffix = where.suffix.lower()
    if suffix not in (*_TEXTS, *_LAID_OUT):
        raise ConfigError(
            f"draw: got the path {str(where)!r}, expected one that ends in "
            f"{', '.join((*_TEXTS, *_LAID_OUT))}"
        )
    if not where.parent.is_dir():
        raise ConfigError(f"draw: the folder {str(where.parent)!r} does not exist; make it first")
    if suffix in _LAID_OUT:
        _graphviz(suffix)
    return where


def drawing_of(
    form: Form, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Drawing:
    """The picture of a form; `model` gives the classes of modules."""
    return Drawing(picture_of(form, model, "" if optimizer is None else type(optimizer).__name__))


def _graphviz(suffix: str) -> str:
    program = shutil.which("dot")
    if program is None:
        raise ConfigError(
            f"draw: Graphviz makes {suffix} files, and its program `dot` is not installed; install "
            "it (`apt-get install graphviz`, `brew install graphviz`), or draw to a .dot or .mmd "
            "file, which need no program"
        )
    return program


def _laid_out(text: str, suffix: str) -> bytes:
    command = [_graphviz(suffix), f"-T{suffix.removeprefix('.')}"]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise PlanError(f"draw: {command[0]} ended with {done.returncode}: {message}")
    return done.stdout
