# SPDX-License-Identifier: Apache-2.0
"""The hidden model of generated clicks."""

from __future__ import annotations

import numpy as np
import pytest

from fleetlight.data.generated.tables import PlantedModel

SIZES = (10, 20, 30, 1000)


def inputs(rows: int = 4_000, dense: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, dense)), rng.integers(-(2**63), 2**63 - 1, (rows, len(SIZES)))


def fitted(seed: int = 0) -> PlantedModel:
    model = PlantedModel(SIZES, 3, seed)
    model.fit(*inputs())
    return model


def log_odds(chances: np.ndarray) -> np.ndarray:
    return np.log(chances / (1 - chances))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_click_rate_and_spread_match_real_logs(seed: int) -> None:
    chances = fitted(seed).probabilities(*inputs())
    assert chances.mean() == pytest.approx(0.25, abs=1e-3)
    assert log_odds(chances).std() == pytest.approx(1.35, abs=1e-3)


def test_each_seed_has_its_own_model() -> None:
    one, two = (log_odds(fitted(seed).probabilities(*inputs())) for seed in (0, 1))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.5


def test_every_field_has_an_effect() -> None:
    dense, ids = inputs()
    before = fitted().probabilities(dense, ids)
    for column in range(3):
        changed = dense.copy()
        changed[:, column] += 1
        assert np.abs(fitted().probabilities(changed, ids) - before).min() > 0
    for column in range(len(SIZES)):
        changed = ids.copy()
        changed[:, column] ^= 1
        assert np.abs(fitted().probabilities(dense, changed) - before).mean() > 0.01


def test_pairs_of_fields_with_few_ids_have_effects() -> None:
    """Log-odds of two fields do not add up: changing both differs from the sum of both changes."""
    model = fitted()
    dense, ids = inputs()

    def changed(*columns: int) -> np.ndarray:
        other = ids.copy()
        other[:, columns] += 1
        return log_odds(model.probabilities(dense, other))

    def is_sum(one: int, two: int) -> bool:
        return np.allclose(changed(one) + changed(two), changed(one, two) + changed())

    assert not is_sum(0, 1)
    assert is_sum(0, 2)
    assert is_sum(1, 3)


def test_one_field_without_numbers_is_supported() -> None:
    model = PlantedModel([5], 0, 0)
    ids = np.arange(200, dtype=np.int64)[:, None]
    model.fit(np.zeros((200, 0)), ids)
    assert model.probabilities(np.zeros((200, 0)), ids).mean() == pytest.approx(0.25, abs=1e-3)
