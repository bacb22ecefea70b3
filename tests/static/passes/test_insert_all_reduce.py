# SPDX-License-Identifier: Apache-2.0
"""Each gradient is reduced once, in place if possible, before its first use."""

from typing import Any

import pytest
import torch
from tests.static.doubling import eager, reductions, rewritten, run
from tests.static.nets import batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.static.drawing.text import short_name
from fleetlight.static.passes import InsertAllReduce

pytestmark = pytest.mark.slow


def program_of(model: nn.Module, **given: Tensor) -> static.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return static.capture(model, nn.functional.cross_entropy, optimizer, given or batch(0))


def added_operations(program: static.Program) -> list[str]:
    """The operations that the pass adds."""
    before = {node.name for node in program.form.graph.nodes}
    after = rewritten(program.form, InsertAllReduce()).graph.nodes
    return [short_name(node) for node in after if node.name not in before]


def test_all_reductions_begin_after_backward_and_then_end() -> None:
    form = rewritten(program_of(net()).form, InsertAllReduce())
    assert form.reports == ("6 gradients, each reduced separately",)
    begins = [("begin", n) for n in range(6)]
    assert reductions(form.graph) == begins + [("end", n) for n in range(6)]


def adam(parameters: Any, lr: float) -> torch.optim.Adam:
    """With the usual eps, the last digit of a gradient near zero moves a parameter by 1e-12."""
    return torch.optim.Adam(parameters, lr, eps=1e-4)


@pytest.mark.parametrize("kind", [torch.optim.SGD, adam], ids=["SGD", "Adam"])
def test_the_optimizer_uses_reduced_gradients(kind: Any) -> None:
    ours, theirs = net(), net()
    mine, other = (kind(m.parameters(), lr=0.01) for m in (ours, theirs))
    program = captured(ours, mine).apply(InsertAllReduce())
    for number in range(4):
        torch.manual_seed(number)
        expected = eager(theirs, other, batch(number))
        torch.manual_seed(number)
        doubling, [loss] = run(program, batch(number), "loss")
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        assert len(doubling.log) == 12
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


class Odd(nn.Module):
    """Its gradients are transposed, expanded, shared, scalar, and three-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.randn(8, 3))
        self.added, self.too = (nn.Parameter(torch.randn(3)) for _ in range(2))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.cube = nn.Parameter(torch.randn(2, 3, 8))
        self.once = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.turned + (self.added + self.too)
        return (out + torch.einsum("bi,koi->bo", x, self.cube)) * self.number + self.once.sum()


def test_gradients_of_all_layouts_are_reduced() -> None:
    ours, theirs = Odd().double(), Odd().double()
    program = program_of(ours).apply(InsertAllReduce())
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        eager(theirs, other, batch(number))
        run(program, batch(number))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


def test_gradients_with_own_memory_are_not_copied() -> None:
    """Gradients of linear layers are transposed; their rows are views."""
    assert not {"clone", "cat", "_to_copy"} & set(added_operations(program_of(net())))
    turned = nn.Linear(3, 8, bias=False).double()

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = turned.weight

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    assert "clone" not in added_operations(program_of(Turned()))


def test_gradients_that_others_read_are_copied() -> None:
    program = program_of(Odd().double())
    # `added` and `too` have one gradient; those of `once` and `cube` are expanded
    assert added_operations(program).count("clone") == 4
    model = net()
    seen = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    recorder = seen.writable_source().recorder
    marks = [n for n in recorder.graph.nodes if "gradient" in str(n.target)]
    recorder.names["gradient of the last bias"] = marks[-1].all_input_nodes[0]
    assert added_operations(seen).count("clone") == 1


def test_a_program_without_gradients_is_unchanged() -> None:
    program = static.capture(net(), nn.functional.cross_entropy, None, batch(0))
    form = rewritten(program.form, InsertAllReduce())
    assert form.reports == ("0 gradients, each reduced separately",)
    assert str(form.graph) == str(program.form.graph)
