# SPDX-License-Identifier: Apache-2.0
"""Which feeds a program accepts and refuses."""

from typing import Any

import numpy as np
import pytest
import torch

from fleetlight.errors import ConfigError
from fleetlight.static.graph.feeds import Feed, accept, feed_of

X = Feed("x", (None, 3), torch.float32, ("batch", None))
Y = Feed("y", (None,), torch.int64, ("batch",))
FEEDS = {"x": X, "y": Y}


def given(batch: int = 2) -> dict[str, Any]:
    return {"x": torch.ones(batch, 3), "y": torch.zeros(batch, dtype=torch.int64)}


def test_feeds_are_ordered_as_the_program_takes_them() -> None:
    x, y = accept(FEEDS, {"y": np.array([1, 2]), "x": np.ones((2, 3), np.float32)})
    assert (x.shape, y.tolist()) == ((2, 3), [1, 2])
    assert len(accept(FEEDS, given(7))[0]) == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, r"feed 'x' is missing: .* x: float32\[\?, 3\]; y: int64\[\?\], got 'y'"),
        ({"z": 1}, "feed 'z' is not one of this program"),
        ({"x": torch.ones(2, 4)}, r"'x': got the shape \[2, 4\], expected \[any, 3\]"),
        ({"x": torch.ones(3)}, r"got the shape \[3\]"),
        ({"x": torch.ones(2, 3).double()}, r"'x': got torch.float64, expected torch.float32"),
        ({"y": [[]]}, "feed 'y': got torch.float64"),
        ({"x": object()}, "feed 'x': got a object, expected a tensor"),
        ({"x": torch.ones(3, 3)}, "'y' has 2 in dimension 0, and feed 'x' 3 in dimension 0"),
    ],
)
def test_mismatched_feeds_are_refused(change: dict[str, Any], words: str) -> None:
    feeds = {name: value for name, value in {**given(), **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        accept(FEEDS, feeds)


def test_a_size_read_by_the_program_is_fixed() -> None:
    with pytest.raises(ConfigError, match=r"got the shape \[2, 3\], expected \[4, 3\]"):
        Feed("x", (4, 3), torch.float32).accepted(torch.ones(2, 3))


@pytest.mark.parametrize("declared", [(None,), (None, 1), (4,), (4, 1)])
@pytest.mark.parametrize("fed", [(4,), (4, 1)])
def test_labels_are_fed_as_a_row_or_as_a_column(
    declared: tuple[int | None, ...], fed: tuple[int, ...]
) -> None:
    accepted = Feed("y", declared, torch.int64).accepted(torch.arange(4).reshape(fed))
    assert accepted.shape == (4, 1)[: len(declared)]
    assert accepted.flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("declared", "fed"),
    [((None, 1), (4, 2)), ((None,), (4, 2)), ((5, 1), (4,)), ((None, 1), (1, 4))],
)
def test_other_shapes_of_labels_are_refused(
    declared: tuple[int | None, ...], fed: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"'y': got the shape \["):
        Feed("y", declared, torch.int64).accepted(torch.zeros(fed, dtype=torch.int64))


def test_declarations_accept_minus_one_and_type_names() -> None:
    assert feed_of("x", [-1, 3], "float32") == feed_of("x", [None, 3], torch.float32)
    for shape, dtype in (([0], "float32"), (["a"], "float32"), ([1], "float33"), ([1], 3)):
        with pytest.raises(ConfigError, match="data 'x'"):
            feed_of("x", shape, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [4, "4", None])
def test_a_shape_is_a_list(shape: Any) -> None:
    with pytest.raises(ConfigError, match=r"^data 'q': got the shape .*, expected a list of sizes"):
        feed_of("q", shape, "float32")


def test_misspelt_types_get_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"dtype='flot32', expected .*did you mean 'float32'"):
        feed_of("q", [4], "flot32")
    with pytest.raises(ConfigError, match=r"known names: float32, float64, bfloat16, int64"):
        feed_of("q", [4], "zzz")
