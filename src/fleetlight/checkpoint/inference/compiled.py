# SPDX-License-Identifier: Apache-2.0
"""Programs compiled to machine code, which need a C++ compiler when they are exported."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from fleetlight.checkpoint.inference.inference_manifest import ConstantEntry, InferenceManifest
from fleetlight.checkpoint.inference.served import RowView, new_values
from fleetlight.errors import CheckpointError

if TYPE_CHECKING:
    from fleetlight.torch_compat.compiler.inductor import CompiledPackage


def compile_program(program: ExportedProgram) -> bytes:
    """The compiled program, as a package."""
    # imported late: the compiler is slow to import, and most processes never need it
    from fleetlight.torch_compat.compiler.inductor import compile_package

    with tempfile.TemporaryDirectory(prefix="fleet-compile-") as folder:
        path = Path(folder, "compiled.pt2")
        try:
            compile_package(program, path)
        except Exception as error:  # the compiler raises many kinds
            raise CheckpointError(
                f"the program cannot be compiled: {error}; check that there is a C++ compiler, or "
                "export with form='program'"
            ) from error
        return path.read_bytes()


def load_compiled(path: Path, manifest: InferenceManifest, device: torch.device) -> CompiledProgram:
    """Load a package. Its code runs in this process: load only what you trust."""
    from fleetlight.torch_compat.compiler.inductor import load_package

    state = {entry.name: _shaped(entry) for entry in manifest.state}
    try:
        return CompiledProgram(load_package(path, device), state, device, manifest.prefix)
    except Exception as error:  # torch raises many kinds here
        raise CheckpointError(
            f"{path} (compiled with torch {manifest.torch}) cannot be loaded with torch "
            f"{torch.__version__} on this machine: {error}; export it again here, or with "
            "form='program'"
        ) from error


def _shaped(entry: ConstantEntry) -> Tensor:
    """A tensor without values, of the kind of an entry."""
    value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
    return nn.Parameter(value, requires_grad=False) if entry.is_parameter else value


class CompiledProgram:
    """A loaded package. One call runs at a time; its operations use all threads."""

    def __init__(
        self,
        package: CompiledPackage,
        state: Mapping[str, Tensor],
        device: torch.device,
        prefix: str,
    ) -> None:
        self._package, self._state, self._device = package, state, device
        self._prefix = prefix
        self._lock = threading.Lock()
        self._number = -1

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run with the dense values of the export."""
        with self._lock:
            return self._package(*args, **kwargs)

    def with_values(self, view: RowView, rows: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Run with the dense values of a publication; see `served.Runnable`."""
        with self._lock:
            if view.number != self._number:
                found = new_values(self._state, view, self._prefix, self._device)
                used = set(self._package.get_constant_fqns())
                values = {name: value for name, value in found.items() if name in used}
                self._package.load_constants(values, check_full_update=False)
                self._number = view.number
            return self._package(tuple(rows), *inputs)
