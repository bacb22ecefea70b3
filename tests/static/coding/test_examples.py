# SPDX-License-Identifier: Apache-2.0
"""Examples know which sizes are dynamic, and what the compiler assumed about them."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fleetlight.static.coding.inductor import Examples

aten: Any = torch.ops.aten


def doubled() -> tuple[fx.Graph, fx.Node, fx.Node]:
    """A weight and a batch; the batch is concatenated with itself."""
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    rows = graph.call_function(aten.mm.default, (x, weight))
    both = graph.call_function(aten.cat.default, ([rows, rows],))
    graph.output([both])
    return graph, rows, both


def inputs(size: int) -> list[Tensor]:
    return [torch.zeros(3, 4), torch.zeros(size, 3)]


def examples_for(size: int) -> tuple[Examples, fx.Node]:
    graph, _, both = doubled()
    return Examples(graph, inputs(size), [None, (None, 3)]), both


@pytest.mark.slow
def test_only_dynamic_sizes_are_symbolic() -> None:
    examples, both = examples_for(5)
    rows, columns = examples.of(both).shape
    assert isinstance(rows, torch.SymInt)
    assert columns == 4


def test_other_sizes_fit_without_assumptions() -> None:
    examples, _ = examples_for(5)
    assert all(examples.fit()(inputs(size)) for size in (2, 5, 64))


def test_a_guard_on_a_size_must_hold() -> None:
    examples, both = examples_for(5)
    assert examples.of(both).shape[0] <= 20
    fits = examples.fit()
    assert fits(inputs(10))
    assert not fits(inputs(11))


def test_a_specialised_size_fits_alone() -> None:
    examples, both = examples_for(5)
    assert int(examples.of(both).shape[0]) == 10
    fits = examples.fit()
    assert [size for size in range(1, 9) if fits(inputs(size))] == [5]


def test_a_guard_without_python_text_fits_its_size_alone(monkeypatch: Any) -> None:
    printer = "fleetlight.static.coding.inductor.as_python"
    for text in ("no python", "unknown(1)", "False"):
        examples, both = examples_for(5)
        assert examples.of(both).shape[0] <= 20
        with monkeypatch.context() as patch:
            patch.setattr(printer, lambda expr, text=text: text)
            fits = examples.fit()
        assert [size for size in range(1, 9) if fits(inputs(size))] == [5]
