# SPDX-License-Identifier: Apache-2.0
"""First values equal the twin bit for bit and have the requested distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import id_batches, same

from fleetlight.errors import ConfigError
from fleetlight.kernels import Initializer, first_values, table_seed, twin_table
from fleetlight.kernels.rows.first_values import KINDS

initializers = st.builds(
    Initializer, st.sampled_from(KINDS), st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)
)


@settings(deadline=None)
@given(id_batches, st.integers(1, 33), st.integers(-(2**70), 2**70), initializers)
def test_first_values_equal_the_twin_bit_for_bit(
    ids: NDArray[np.int64], dim: int, seed: int, initializer: Initializer
) -> None:
    ours = first_values(ids, dim, seed, initializer)
    assert same(ours, twin_table.first_values(ids, dim, seed, initializer))


def test_first_values_never_change_between_releases() -> None:
    # a resumed job must give new rows the same first values
    uniform = first_values([7, -7], 2, 42, Initializer("uniform", -0.5, 0.5))
    normal = first_values([7, -7], 2, 42, Initializer("normal", 0.0, 0.01))
    assert [value.hex() for value in uniform.ravel().tolist()] == [
        "-0x1.64814c0000000p-2",
        "-0x1.beee400000000p-2",
        "-0x1.6381700000000p-2",
        "-0x1.04e1400000000p-5",
    ]
    assert [value.hex() for value in normal.ravel().tolist()] == [
        "0x1.03ae140000000p-11",
        "-0x1.6f0a3e0000000p-12",
        "0x1.5a999a0000000p-8",
        "0x1.01099a0000000p-6",
    ]


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation"),
    [
        (Initializer("uniform", -1.0, 3.0), 1.0, 4 / 12**0.5),
        (Initializer("normal", 2.0, 0.5), 2.0, 0.5),
    ],
    ids=["uniform", "normal"],
)
def test_mean_and_deviation_match_the_initializer(
    initializer: Initializer, mean: float, deviation: float
) -> None:
    values = first_values(np.arange(50_000), 8, 1, initializer).astype(np.float64)
    assert values.mean() == pytest.approx(mean, abs=0.01)
    assert values.std() == pytest.approx(deviation, rel=0.01)
    # values of adjacent ids or columns are uncorrelated
    assert abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.02
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.02


def test_normal_values_have_tails() -> None:
    values = first_values(np.arange(100_000), 4, 1, Initializer("normal", 0.0, 1.0))
    assert np.mean(np.abs(values) > 2) == pytest.approx(0.0455, abs=0.002)
    assert np.abs(values).max() > 4


def test_values_differ_between_seeds_ids_and_columns() -> None:
    uniform = Initializer("uniform", 0.0, 1.0)
    values = [first_values(np.arange(1000), 4, seed, uniform) for seed in (0, 1, 2)]
    assert len(np.unique(np.stack(values))) > 11_990


def test_table_seed_depends_on_job_seed_and_name() -> None:
    assert table_seed(0, "user") == 5312784502436322170
    assert len({table_seed(j, n) for j in range(10) for n in ("user", "item")}) == 20


def test_invalid_initializers_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'uniform'"):
        Initializer("unifrom")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected numbers"):
        Initializer("normal", 0.0, float("nan"))
