# SPDX-License-Identifier: Apache-2.0
"""Inputs have the names of forward's parameters; a wrong one is named before the run."""

import re

import pytest
import torch
from torch import Tensor

from fleetlight.checkpoint.inference.inputs import InputEntry, Inputs, bind_inputs, name_examples
from fleetlight.errors import ConfigError

X, Y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
ENTRIES = [InputEntry("x", "float32", (None, 3)), InputEntry("ids", "int64", (None,))]


def forward(x: Tensor, ids: Tensor, *more: Tensor, scale: Tensor | None = None) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("examples", "names", "positional"),
    [
        ((X, Y), ["x", "ids"], True),
        ([X, Y, X], ["x", "ids", "more_0"], True),
        ({"ids": Y, "x": X}, ["ids", "x"], False),
        ({"x": X, "ids": Y, "scale": X}, ["x", "ids", "scale"], False),
    ],
)
def test_example_inputs_are_named_as_in_forward(
    examples: Inputs, names: list[str], positional: bool
) -> None:
    named, by_position = name_examples(forward, examples)
    assert (list(named), by_position) == (names, positional)


def test_one_tensor_needs_no_list() -> None:
    named, _ = name_examples(torch.nn.Linear(3, 1).forward, X)
    assert list(named) == ["input"]


def test_examples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"do not fit forward\(x: .*missing .*'ids'"):
        name_examples(forward, X)
    with pytest.raises(ConfigError, match="got an unexpected keyword argument 'z'"):
        name_examples(forward, {"x": X, "ids": Y, "z": Y})
    with pytest.raises(ConfigError, match="example input 'ids': got a int, expected a tensor"):
        name_examples(forward, {"x": X, "ids": 3})  # type: ignore[dict-item]


def test_inputs_are_ordered_as_in_the_example() -> None:
    for values in (
        bind_inputs(ENTRIES, (X, Y), {}),
        bind_inputs(ENTRIES, (X,), {"ids": Y}),
        bind_inputs(ENTRIES, (), {"ids": Y, "x": X}),
    ):
        assert values[0] is X
        assert values[1] is Y


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X, Y, Y), {}, "got 3 inputs, expected 2: x, ids"),
        ((X,), {}, "missing input 'ids'; expected all of: x, ids"),
        ((X,), {"idz": Y}, "unknown input 'idz'; did you mean 'ids'?"),
        ((X, Y), {"x": X}, "input 'x' was given twice"),
        ((X.double(), Y), {}, "input 'x': got float64[2, 3], expected float32[batch, 3]"),
        ((X[:, :2], Y), {}, "input 'x': got float32[2, 2], expected float32[batch, 3]"),
        ((X[0], Y), {}, "input 'x': got float32[3], expected float32[batch, 3]"),
        ((X, [1, 2]), {}, "input 'ids': got a list, expected a tensor int64[batch]"),
        ((X, Y[:1]), {}, "input 'ids' has a batch of 1, but 'x' has one of 2"),
        ((X[:0], Y[:0]), {}, "input 'x' is an empty batch; expected at least one row"),
    ],
)
def test_a_wrong_input_is_named(
    args: tuple[Tensor, ...], kwargs: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        bind_inputs(ENTRIES, args, kwargs)
