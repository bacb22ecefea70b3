# SPDX-License-Identifier: Apache-2.0
"""Which operations of a graph become narrow, and which casts they need."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fleetlight import static
from fleetlight.static.drawing.text import short_name
from fleetlight.static.graph.form import Form, graph_of
from fleetlight.static.passes import Amp

F = nn.functional


class FunctionModel(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def narrowed(forward: Callable[[nn.Module, Tensor], Tensor]) -> tuple[Form, Tensor, Tensor]:
    """Returns the narrow form, its result, and the result of autocast."""
    model = FunctionModel(forward)
    given = {"x": torch.randn(4, 6)}
    program = static.capture(model, None, None, given).apply(Amp())
    (found,) = static.Executor().run(program, given, ["output"])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(given["x"])
    return program.form, found, expected.float()


def counted(form: Form) -> Counter[str]:
    graph = graph_of(form, ["output"], ("forward",))
    return Counter(short_name(node) for node in graph.nodes if node.op == "call_function")


def narrow_nodes(form: Form) -> set[str]:
    return {
        short_name(node)
        for node in form.graph.nodes
        if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dtype == torch.bfloat16
    }


def test_products_pass_narrow_results_directly() -> None:
    """Casts: weights, biases and the input, and the last result; none between the two layers."""
    form, found, expected = narrowed(lambda m, x: m.two(F.relu(m.one(x))))
    assert counted(form)["_to_copy"] == 5 + 1
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert "2 operations compute in bfloat16, 5 tensors are cast" in form.reports[0]


def test_a_tensor_is_cast_once() -> None:
    """Also if several views read it."""
    form, found, expected = narrowed(lambda m, x: m.one(x) + m.one(x.view(4, 6)) + x @ m.one.weight)
    assert counted(form)["_to_copy"] == 3 + 3
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_tensor_changed_in_place_is_cast_again() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.one(x)
        before = m.two(y)
        y.view(-1).mul_(-3)
        return before + m.two(y.t().t())

    _, found, expected = narrowed(forward)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_operations_that_autocast_keeps_wide_stay_wide() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return F.softmax(F.gelu(F.layer_norm(m.one(x), (6,))), dim=1).sum(1).exp()

    form, _, _ = narrowed(forward)
    assert narrow_nodes(form) == {"addmm", "t", "_to_copy"}


def test_double_precision_is_not_narrowed() -> None:
    model = nn.Linear(3, 3).double()
    program = static.capture(model, None, None, {"x": torch.randn(2, 3).double()})
    form = program.apply(Amp()).form
    assert "0 operations compute in bfloat16, 0 tensors are cast" in form.reports[0]
    assert len(form.graph.nodes) == len(program.form.graph.nodes)


@pytest.mark.slow
def test_every_value_keeps_its_name_and_type() -> None:
    model = FunctionModel(
        lambda m, x: F.scaled_dot_product_attention(m.one(x), m.two(x), x[None])[0]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = static.capture(model, lambda y: y.sum(), optimizer, {"x": torch.randn(4, 6)})

    def kinds(form: Form) -> dict[str, tuple[torch.dtype, str]]:
        values = {node.name: node.meta.get("val") for node in form.graph.nodes}
        return {n: (v.dtype, str(v.shape)) for n, v in values.items() if isinstance(v, Tensor)}

    before, after = kinds(program.form), kinds(program.apply(Amp()).form)
    assert before.items() <= after.items()
