# SPDX-License-Identifier: Apache-2.0
"""A graph is compiled to C++ if there is a compiler."""

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fleetlight.torch_compat import fakes
from fleetlight.torch_compat.compiler import inductor

pytestmark = pytest.mark.contract


def test_a_missing_compiler_raises_an_expected_error() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/no/such/compiler",)}), pytest.raises((RuntimeError, OSError)):
        inductor.find_cpp_compiler()


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first compilation with a torch also compiles its headers
def test_a_graph_is_compiled() -> None:
    try:
        inductor.find_cpp_compiler()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"no C++ compiler: {error}")
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 2)),))
    module = fx.GraphModule(nn.Module(), graph)
    mode = fakes.fakes_of(ShapeEnv(specialize_zero_one=False, duck_shape=False))
    example = fakes.open_fake(mode, torch.ones(4, 3), [True, False])
    with torch.no_grad():
        function = inductor.compiled(module, [example], mode)
    for rows in (4, 7):
        [out] = function(torch.ones(rows, 3))
        assert out.tolist() == [[2.0] * 3] * rows
