# SPDX-License-Identifier: Apache-2.0
"""Random bits as a pure function of numbers."""

import numpy as np

from fleetlight.data.random_bits import key_of, lanes, uniform
from fleetlight.kernels.ids.hashing import mix


def test_mix_is_splitmix64() -> None:
    # the first numbers of the published generator, started at 0
    states = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert [hex(value) for value in mix(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]


def test_keys_depend_on_all_parts_and_their_order() -> None:
    keys = [key_of(*parts) for parts in [(1,), (2,), (-1,), (1, 2), (2, 1), (1, 2, 0)]]
    assert len(set(map(int, keys))) == len(keys)
    assert key_of(1, 2) == key_of(1, 2)


def test_uniform_numbers_are_even_and_uncorrelated() -> None:
    draws = uniform(lanes(mix(np.arange(20_000, dtype=np.uint64)), 3))
    assert 0 <= draws.min() < draws.max() < 1
    assert np.abs(np.histogram(draws, 20, (0, 1))[0] - 3_000).max() < 5 * np.sqrt(3_000)
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.03
