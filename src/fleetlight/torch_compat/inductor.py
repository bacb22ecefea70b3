# SPDX-License-Identifier: Apache-2.0
"""torch's compiler of graphs to C++: `torch._inductor`.

Why: `torch.compile` takes a function of Python and traces it again. Fleetlight has the graph, and
compiles parts of it. Where there is no compiler, generated Python runs instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._guards import TracingContext, tracing

from fleetlight.torch_compat.fakes import FakeTensorMode


def find_cpp_compiler() -> None:
    """Raise RuntimeError or OSError where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    get_cpp_compiler()


def compiled(
    module: fx.GraphModule, inputs: Sequence[Any], fakes: FakeTensorMode, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """A graph as C++, for inputs of these shapes."""
    import torch._inductor

    with tracing(TracingContext(fakes)), warnings.catch_warnings():
        # torch uses what it has deprecated, which is not the user's business
        warnings.simplefilter("ignore", DeprecationWarning)
        made: Callable[..., Any] = torch._inductor.compile(module, list(inputs), dict(options))
    return made
