# SPDX-License-Identifier: Apache-2.0
"""torch's compiler of graphs to C++: `torch._inductor`.

Why: `torch.compile` takes a function of Python and traces it again. Fleetlight has the graph, and
compiles parts of it. Where there is no compiler, generated Python runs instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch.export import ExportedProgram

from fleetlight.torch_compat.fakes import FakeTensorMode


def find_cpp_compiler() -> None:
    """Raise RuntimeError or OSError where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    get_cpp_compiler()


def compiled(
    module: fx.GraphModule, inputs: Sequence[Any], fakes: FakeTensorMode
) -> Callable[..., Any]:
    """Compile a graph to C++ for inputs of these shapes, which the caller has checked."""
    import torch._inductor
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    # torch 2.15 gives open sizes their names only where it checks them, and else raises NameError
    needs_checks = hasattr(PythonWrapperCodegen, "bind_input_symbol")

    with tracing(TracingContext(fakes)), warnings.catch_warnings():
        # torch uses its own deprecated names, which the user cannot change
        warnings.simplefilter("ignore", DeprecationWarning)
        made: Callable[..., Any] = torch._inductor.compile(
            module, list(inputs), {"size_asserts": needs_checks}
        )
    return made


class CompiledPackage(Protocol):
    """A loaded package of machine code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""

    def get_constant_fqns(self) -> list[str]:
        """The names of its parameters and buffers."""

    def load_constants(self, constants_map: dict[str, Tensor], *, check_full_update: bool) -> None:
        """Replace values."""


def compile_package(program: ExportedProgram, path: Path) -> None:
    """Compile an exported program to a package, which runs without Python."""
    import torch._inductor

    find_cpp_compiler()
    with warnings.catch_warnings():
        # torch uses its own deprecated names, which the user cannot change
        warnings.simplefilter("ignore")
        # without it small parameters become part of the code, and cannot be replaced
        options = {"always_keep_tensor_constants": True}
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options
        )


def load_package(path: Path, device: torch.device) -> CompiledPackage:
    """Load a package onto a device."""
    import torch._inductor

    index = -1 if device.index is None else device.index
    loaded: CompiledPackage = torch._inductor.aoti_load_package(str(path), device_index=index)
    return loaded
