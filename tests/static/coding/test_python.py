# SPDX-License-Identifier: Apache-2.0
"""A graph as a Python function: arguments pass unchanged, values are freed after their last use."""

import linecache
import math
import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fleetlight.errors import PlanError
from fleetlight.static.coding.python import function_of


def taken(*values: Any, **named: Any) -> Any:
    return values, named


ODD: list[Any] = [
    *(1, -2.5, math.inf, -math.inf, True, None, "a'b", [1, [2.0]], (3,), (), []),
    *(slice(1, None, 2), torch.float16, torch.device("cpu"), torch.channels_last, range(3)),
]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_every_argument_passes_unchanged(value: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    # graphs hold lists and dicts of their own kinds
    graph.output(graph.call_function(taken, (x, [value, x]), {"named": value}))
    (first, (second, again)), named = function_of(graph)("given")
    assert (first, again, second, named) == ("given", "given", value, {"named": value})
    assert type(second) is type(value)


def test_generated_names_avoid_taken_names() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("run", "aten_add_Tensor", "slice", "taken")]
    total = graph.call_function(torch.ops.aten.add.Tensor, (inputs[1], inputs[1]))
    piece = graph.call_function(operator.getitem, (total, slice(0, 1)))
    graph.output(graph.call_function(taken, (*inputs, piece)))
    values = [torch.tensor([float(i), 5.0]) for i in range(4)]
    (*given, found), _ = function_of(graph)(*values)
    assert all(one is other for one, other in zip(given, values, strict=True))
    assert found.tolist() == [2.0]


def test_a_value_is_freed_after_its_last_use() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def add_one(x: Tensor) -> Tensor:
        out = x + 1
        alive.append(weakref.ref(out))
        return out

    def count_alive(x: Tensor) -> int:
        return sum(one() is not None for one in alive)

    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(5):
        value = graph.call_function(add_one, (value,))
    graph.output([graph.call_function(count_alive, (value,))])
    # the argument under count still has a name
    assert function_of(graph)(torch.zeros(2)) == [1]


def test_a_call_without_users_still_runs() -> None:
    graph = fx.Graph()
    graph.call_function(torch.ops.aten.add_.Tensor, (graph.placeholder("x"), 1))
    graph.output([])
    x_value = torch.zeros(2)
    assert function_of(graph)(x_value) == []
    assert x_value.tolist() == [1.0, 1.0]


def test_a_traceback_shows_generated_lines_until_the_function_is_freed() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.mm.default, (graph.placeholder("x"),) * 2))
    function = function_of(graph)
    with pytest.raises(RuntimeError) as caught:
        function(torch.zeros(2, 3))
    assert "= aten_mm(x, x)" in "".join(traceback.format_exception(caught.value))
    file = function.__code__.co_filename
    assert file in linecache.cache
    del function, caught
    assert file not in linecache.cache


def test_modules_are_not_called() -> None:
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    with pytest.raises(PlanError, match="no code for call_module 'layer'"):
        function_of(graph)
