# SPDX-License-Identifier: Apache-2.0
"""torch's compiler of graphs to C++: `torch._inductor`.

Why: `torch.compile` takes a function of Python and traces it again. Fleetlight has the graph, and
compiles parts of it. Where there is no compiler, generated Python runs instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._guards import TracingContext, tracing

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
