# SPDX-License-Identifier: Apache-2.0
"""Examples know what is open, and what has been taken for granted of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.static.coding.examples import Examples

aten: Any = torch.ops.aten


def doubled() -> tuple[fx.Graph, fx.Node, fx.Node]:
    """A weight and a batch; the batch is put behind itself."""
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    rows = graph.call_function(aten.mm.default, (x, weight))
    both = graph.call_function(aten.cat.default, ([rows, rows],))
    graph.output([both])
    return graph, rows, both


def inputs(size: int) -> list[Tensor]:
    return [torch.zeros(3, 4), torch.zeros(size, 3)]


def made(size: int) -> tuple[Examples, fx.Node]:
    graph, _, both = doubled()
    return Examples(graph, inputs(size), [None, (None, 3)]), both


def test_open_sizes_are_open_and_the_others_are_not() -> None:
    examples, both = made(5)
    rows, columns = examples.of(both).shape
    assert isinstance(rows, torch.SymInt)
    assert columns == 4


def test_other_sizes_fit_where_nothing_was_taken_for_granted() -> None:
    examples, _ = made(5)
    assert all(examples.fit()(inputs(size)) for size in (2, 5, 64))


def test_what_a_compiler_has_decided_by_a_size_must_hold() -> None:
    examples, both = made(5)
    assert examples.of(both).shape[0] <= 20
    fits = examples.fit()
    assert fits(inputs(10))
    assert not fits(inputs(11))


def test_a_size_that_was_taken_as_it_is_fits_alone() -> None:
    examples, both = made(5)
    assert int(examples.of(both).shape[0]) == 10
    fits = examples.fit()
    assert [size for size in range(1, 9) if fits(inputs(size))] == [5]


def test_what_has_no_python_fits_alone(monkeypatch: Any) -> None:
    printer = "fleetlight.static.coding.examples.as_python"
    for text in ("no python", "unknown(1)", "False"):
        examples, both = made(5)
        assert examples.of(both).shape[0] <= 20
        with monkeypatch.context() as patch:
            patch.setattr(printer, lambda expr, text=text: text)
            fits = examples.fit()
        assert [size for size in range(1, 9) if fits(inputs(size))] == [5]
