# SPDX-License-Identifier: Apache-2.0
"""Blocks of int8 codes: sent values and error feedback equal the twin bit for bit."""

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


def coded(by: Callable[..., None], values: Floats, residual: Floats | None) -> tuple[Any, ...]:
    """Return scales, codes, the values and the error feedback."""
    values, residual = values.copy(), None if residual is None else residual.copy()
    scales = np.full(block_count(len(values)), -1, np.float32)
    codes = np.full(len(values), -1, np.int8)
    with np.errstate(over="ignore", invalid="ignore"):
        by(values, residual, scales, codes)
    return scales, codes, values, np.zeros(0, np.float32) if residual is None else residual


def decoded(scales: Floats, codes: NDArray[np.int8]) -> Floats:
    total = np.zeros(len(codes), np.float32)
    scales.flags.writeable = codes.flags.writeable = False
    add_blocks(scales, codes, total)
    return total


@st.composite
def long_values(draw: st.DrawFn) -> Floats:
    """Values that fill some blocks and part of the last one."""
    head, tail = draw(some_values), draw(some_values)
    middle = numbers(len(head), draw(st.sampled_from([0, 1, 255, 256, 257, 600])))
    return np.concatenate([head, middle, tail])


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(long_values(), st.sampled_from([None, 0.0, 1e-3, 3e38]))
def test_codes_equal_the_twin(values: Floats, scale: float | None) -> None:
    residual = None if scale is None else numbers(1, len(values)).clip(-1, 1) * np.float32(scale)
    mine, theirs = (coded(by, values, residual) for by in (to_blocks, twin_codecs.to_blocks))
    for ours, twin in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(ours, twin)
    total = decoded(*mine[:2])
    expected = np.zeros_like(total)
    twin_codecs.add_blocks(*theirs[:2], expected)
    assert same(total, expected)


@settings(deadline=None, max_examples=50)
@given(st.lists(finite, min_size=1, max_size=20).map(values_of), st.sampled_from([1, 13, 300]))
def test_residual_is_the_unsent_part(some: Floats, times: int) -> None:
    values = np.repeat(some, times)
    scales, codes, unchanged, residual = coded(to_blocks, values, np.zeros_like(values))
    np.testing.assert_array_equal(unchanged, values)
    np.testing.assert_allclose(decoded(scales, codes) + residual, values, rtol=1e-6, atol=0)
    steps = np.repeat(scales, 256)[: len(values)]
    assert (np.abs(residual) <= np.maximum(0.5001 * steps, 1e-36)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_non_finite_block_decodes_to_nan_and_keeps_its_residual(bad: float) -> None:
    values, before = numbers(0, 600), numbers(1, 600)
    values[300] = bad
    scales, codes, _, residual = coded(to_blocks, values, before)
    assert np.isnan(decoded(scales, codes)).tolist() == [256 <= n < 512 for n in range(600)]
    assert same(residual[256:512], before[256:512])
    assert not (residual[:256] == before[:256]).any()


def test_tiny_values_accumulate_until_they_are_sent() -> None:
    values = np.full(3, 4e-37, np.float32)
    residual, arrived = np.zeros_like(values), []
    for _ in range(3):
        scales, codes, _, residual = coded(to_blocks, values, residual)
        arrived.append(decoded(scales, codes)[0])
    assert arrived[:2] == [0, 0]
    assert arrived[2] == pytest.approx(1.2e-36, rel=0.01)


def test_the_largest_value_is_exact() -> None:
    scales, codes, *_ = coded(to_blocks, np.array([-127, 3, 0.6, -0.0], np.float32), None)
    assert scales.tolist() == [1]
    assert codes.tolist() == [-127, 3, 1, 0]
    assert block_count(0) == 0
    assert (block_count(1), block_count(256), block_count(257)) == (1, 1, 2)
