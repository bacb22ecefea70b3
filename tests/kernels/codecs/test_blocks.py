# SPDX-License-Identifier: Apache-2.0
"""Values as bytes: what is sent and what is owed, bit for bit as the twin has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import numbers, same
from tests.kernels.strange_floats import finite, some_values, values_of

from fleetlight.kernels import add_blocks, block_count, to_blocks
from fleetlight.kernels.codecs import twin_codecs

Floats = NDArray[np.float32]


def coded(by: Callable[..., None], values: Floats, owed: Floats | None) -> tuple[Any, ...]:
    """Scales, codes, what was to be written, what is owed."""
    values, owed = values.copy(), None if owed is None else owed.copy()
    scales = np.full(block_count(len(values)), -1, np.float32)
    codes = np.full(len(values), -1, np.int8)
    with np.errstate(over="ignore", invalid="ignore"):
        by(values, owed, scales, codes)
    return scales, codes, values, np.zeros(0, np.float32) if owed is None else owed


def decoded(scales: Floats, codes: NDArray[np.int8]) -> Floats:
    total = np.zeros(len(codes), np.float32)
    scales.flags.writeable = codes.flags.writeable = False
    add_blocks(scales, codes, total)
    return total


@st.composite
def long_values(draw: st.DrawFn) -> Floats:
    """Some values among many: blocks that are full, and one that is not."""
    head, tail = draw(some_values), draw(some_values)
    middle = numbers(len(head), draw(st.sampled_from([0, 1, 255, 256, 257, 600])))
    return np.concatenate([head, middle, tail])


@settings(deadline=None, max_examples=100)
@given(long_values(), st.sampled_from([None, 0.0, 1e-3, 3e38]))
def test_codes_equal_the_twins(values: Floats, scale: float | None) -> None:
    owed = None if scale is None else numbers(1, len(values)).clip(-1, 1) * np.float32(scale)
    mine, theirs = (coded(by, values, owed) for by in (to_blocks, twin_codecs.to_blocks))
    for ours, twin in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(ours, twin)
    total = decoded(*mine[:2])
    expected = np.zeros_like(total)
    twin_codecs.add_blocks(*theirs[:2], expected)
    assert same(total, expected)


@settings(deadline=None, max_examples=50)
@given(st.lists(finite, min_size=1, max_size=20).map(values_of), st.sampled_from([1, 13, 300]))
def test_what_is_not_sent_is_owed(some: Floats, times: int) -> None:
    values = np.repeat(some, times)
    scales, codes, meant, owed = coded(to_blocks, values, np.zeros_like(values))
    np.testing.assert_array_equal(meant, values)
    np.testing.assert_allclose(decoded(scales, codes) + owed, values, rtol=1e-6, atol=0)
    steps = np.repeat(scales, 256)[: len(values)]
    assert (np.abs(owed) <= np.maximum(0.5001 * steps, 1e-36)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_a_block_with_something_infinite_is_nan_and_owes_what_it_did(bad: float) -> None:
    values, before = numbers(0, 600), numbers(1, 600)
    values[300] = bad
    scales, codes, _, owed = coded(to_blocks, values, before)
    arrived = np.isnan(decoded(scales, codes))
    assert arrived.tolist() == [256 <= n < 512 for n in range(600)]
    assert same(owed[256:512], before[256:512])
    assert not (owed[:256] == before[:256]).any()


def test_the_tiniest_values_wait_until_they_have_added_up() -> None:
    values = np.full(3, 4e-37, np.float32)
    owed, arrived = np.zeros_like(values), []
    for _ in range(3):
        scales, codes, _, owed = coded(to_blocks, values, owed)
        arrived.append(decoded(scales, codes)[0])
    assert arrived[:2] == [0, 0]
    assert arrived[2] == pytest.approx(1.2e-36, rel=0.01)


def test_the_largest_arrives_as_it_is() -> None:
    scales, codes, *_ = coded(to_blocks, np.array([-127, 3, 0.6, -0.0], np.float32), None)
    assert scales.tolist() == [1]
    assert codes.tolist() == [-127, 3, 1, 0]
    assert block_count(0) == 0
    assert (block_count(1), block_count(256), block_count(257)) == (1, 1, 2)
