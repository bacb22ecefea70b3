# SPDX-License-Identifier: Apache-2.0
"""A graph records operations as they are called, as programs do."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fleetlight.torch_compat import fakes, tracing

pytestmark = pytest.mark.contract


class GraphRecorder:
    """A minimal graph recorder: a tracer, its mode, and fake tensors."""

    def __init__(self) -> None:
        self.fakes = fakes.fakes_of(ShapeEnv(specialize_zero_one=False, duck_shape=False))
        self.tracer = tracing.PythonKeyTracer()
        self.tracer.root = nn.Module()
        self.graph = self.tracer.graph = fx.Graph(tracer_cls=tracing.PythonKeyTracer)
        self.mode = tracing.ProxyTorchDispatchMode(self.tracer, "symbolic")

    def placeholder(self, name: str, example: Tensor, is_open: list[bool]) -> Any:
        fake = fakes.open_fake(self.fakes, example, is_open)
        proxy = self.tracer.create_proxy("placeholder", name, (), {}, name=name)
        with self.fakes, self.mode:
            tracing.track_tensor_tree(fake, proxy, constant=None, tracer=self.tracer)
        return fake

    def node_of(self, value: Any) -> fx.Node:
        proxy: Any = tracing.get_proxy_slot(value, self.tracer)
        node = getattr(proxy, "proxy", proxy).node
        assert isinstance(node, fx.Node)
        return node


def test_operations_are_recorded_and_can_be_run() -> None:
    recorder = GraphRecorder()
    x = recorder.placeholder("x", torch.ones(4, 3), [True, False])
    with recorder.fakes, recorder.mode:
        out = torch.ops.aten.mul.Tensor(x, 2)
    node = recorder.node_of(out)
    assert (node.op, node.target) == ("call_function", torch.ops.aten.mul.Tensor)
    assert node.args[0] is recorder.node_of(x)
    recorder.graph.output(node)
    assert fx.GraphModule(nn.Module(), recorder.graph)(torch.ones(5, 3)).tolist() == [[2.0] * 3] * 5


def test_an_untracked_tensor_has_no_node() -> None:
    recorder = GraphRecorder()
    fake = fakes.open_fake(recorder.fakes, torch.ones(2), [False])
    assert tracing.get_proxy_slot(fake, recorder.tracer, None) is None


class RecordsFunctions(tracing.TorchDispatchMode):
    """Records each function and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return tracing.return_and_correct_aliasing(func, args, kwargs or {}, func(*args))


def test_no_dispatch_bypasses_modes() -> None:
    x = torch.ones(2, 3)
    with RecordsFunctions() as mode:
        with tracing.no_dispatch():
            x.t_()
        assert x.shape == (3, 2)
        assert mode.seen == []
        x.add_(1)
        assert mode.seen == [torch.ops.aten.add_.Tensor]
