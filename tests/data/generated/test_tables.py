# SPDX-License-Identifier: Apache-2.0
"""Generated click logs and random tables."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fleetlight.data import ClickLog, Record
from fleetlight.data.generated.distributions import AliasSampler, Zipf
from fleetlight.data.generated.tables import PlantedModel, RandomTable
from fleetlight.errors import ConfigError


def equal(one: Record, two: Record) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_click_log_has_the_shape_of_criteo() -> None:
    batch = ClickLog(100).batch(range(5))
    assert [(tuple(t.shape), t.dtype) for t in batch] == [
        ((5, 13), torch.float32),
        ((5, 26), torch.int64),
        ((5,), torch.float32),
    ]
    assert set(ClickLog(500).batch(range(500)).label.tolist()) == {0, 1}


def test_a_click_log_is_labelled_as_generated() -> None:
    log = ClickLog(10)
    assert log.generated
    assert repr(log) == "<click log of 10 records (generated): 10 records>"


def test_a_record_is_the_same_in_any_order_and_batch() -> None:
    log = ClickLog(5_000, seed=3)
    together = log.batch(torch.arange(5_000))
    for index in (0, 17, 4_999):
        assert equal(log[index], Record(*(column[index] for column in together)))
    assert equal(log.batch([17, 4_999, 17]), Record(*(c[[17, 4_999, 17]] for c in together)))
    assert equal(log.batch([]), Record(*(column[:0] for column in together)))


def test_start_is_a_position_in_the_endless_log() -> None:
    log, part = ClickLog(100), ClickLog(20, start=60)
    assert equal(part.batch(range(20)), log.batch(range(60, 80)))
    assert equal(part.batch([0]), ClickLog(10**12).batch([60]))


def test_seeds_differ() -> None:
    one, two = (ClickLog(50, seed=seed).batch(range(50)) for seed in (0, 1))
    assert not torch.isin(one.ids, two.ids).any()
    assert not torch.equal(one.dense, two.dense)


def test_ids_follow_zipf_within_the_vocabulary() -> None:
    ids = ClickLog(20_000, vocabulary=[3, 100, 10**6], zipf=1.2).batch(range(20_000)).ids
    assert [len(column.unique()) for column in ids[:, :2].T] == [3, 100]
    counts = torch.sort(ids[:, 1].unique(return_counts=True)[1], descending=True)[0]
    # ranks 1 and 10: the areas under x^-1.2 from 1 to 2 and from 10 to 11
    assert counts[0] / counts[9] == pytest.approx(0.6472 / 0.0595, rel=0.3)
    assert (ids < 0).any()


def test_the_vocabulary_decides_the_field_sizes() -> None:
    sizes = ClickLog(1).sizes
    assert (len(sizes), sizes[0], sizes[-1]) == (26, 10, 200_000)
    assert list(sizes) == sorted(sizes)
    assert ClickLog(1, vocabulary=7, sparse_fields=2).sizes == (7, 7)
    assert ClickLog(1, vocabulary=1000, sparse_fields=1).sizes == (1000,)
    log = ClickLog(3, vocabulary=[5, 4], dense_fields=0)
    assert (log[0].dense.shape, log[0].ids.shape) == ((0,), (2,))


def test_best_auc_is_that_of_the_true_probabilities() -> None:
    log = ClickLog(30_000, start=10)
    chances, labels = log.probabilities(range(30_000)), log.batch(range(30_000)).label
    assert log.best_auc == pytest.approx(roc_auc_score(labels, chances), abs=1e-9)
    assert 0.77 < log.best_auc < 0.83
    # labels follow the probabilities: each tenth of the records has the expected clicks
    for part in np.array_split(torch.argsort(chances).numpy(), 10):
        clicks, expected = labels[part].sum().item(), chances[part].sum().item()
        assert abs(clicks - expected) < 5 * np.sqrt(expected)


def test_numbers_have_mean_0_and_variance_1() -> None:
    dense = ClickLog(20_000).batch(range(20_000)).dense
    assert dense.mean(0).abs().max() < 0.05
    assert (dense.std(0) - 1).abs().max() < 0.1


@pytest.mark.slow
def test_a_linear_model_nearly_reaches_the_best_auc() -> None:
    train, test = (ClickLog(60_000, start=s, vocabulary=200, sparse_fields=6) for s in (0, 10**6))
    effects = torch.nn.EmbeddingBag(1 << 14, 1, mode="sum")
    torch.nn.init.zeros_(effects.weight)
    numbers = torch.nn.Linear(13, 1)
    optimizer = torch.optim.Adagrad([*effects.parameters(), *numbers.parameters()], lr=0.1)

    def score(batch: Record) -> torch.Tensor:
        return (effects(batch.ids % (1 << 14)) + numbers(batch.dense)).squeeze(1)

    for batch in train.loader(256):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(score(batch), batch.label).backward()
        optimizer.step()
    unseen = test.batch(range(60_000))
    reached = roc_auc_score(unseen.label, score(unseen).detach())
    assert test.best_auc - 0.025 < reached < test.best_auc


@pytest.mark.parametrize(
    "wrong",
    [
        *({"vocabulary": [10, 0]}, {"vocabulary": [10], "sparse_fields": 2}),
        *({"sparse_fields": 0}, {"start": -1}, {"zipf": -1}),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        ClickLog(10, **wrong)


@pytest.mark.parametrize("index", [-1, 10])
def test_indices_outside_the_log_are_refused(index: int) -> None:
    with pytest.raises(IndexError, match=f"got indices from {index} to {index}, expected 0 to"):
        ClickLog(10).batch([index])


def test_a_batch_has_the_shape_of_the_tuning_example() -> None:
    x, y = next(iter(DataLoader(RandomTable(), batch_size=128)))
    assert (x.shape, x.dtype) == ((128, 32), torch.float32)
    assert (y.shape, y.dtype) == ((128,), torch.int64)
    assert 0 <= x.min() < 0.01 < 0.99 < x.max() < 1


def test_a_random_table_is_labelled_as_generated() -> None:
    assert RandomTable.generated
    assert repr(RandomTable(10, 3)) == "<random table 10 x 3 (generated)>"


def test_rows_depend_on_the_seed_only() -> None:
    assert torch.equal(RandomTable(5, seed=1)[3][0], RandomTable(5, seed=1)[3][0])
    assert not torch.equal(RandomTable(5, seed=1)[3][0], RandomTable(5, seed=2)[3][0])


@pytest.mark.parametrize("classes", [2, 5])
def test_every_class_appears(classes: int) -> None:
    table = RandomTable(2000, classes=classes)
    counts = np.bincount([table[index][1] for index in range(2000)])
    assert counts.size == classes
    assert counts.min() > 2000 / classes / 3


def test_the_labels_can_be_learned() -> None:
    x, y = next(iter(DataLoader(RandomTable(4000), batch_size=4000)))
    weights = torch.linalg.lstsq(x[:3000] - 0.5, y.float().mul(2).sub(1)[:3000, None]).solution
    assert ((x[3000:] - 0.5) @ weights > 0).squeeze().eq(y[3000:] == 1).float().mean() > 0.9


def test_iteration_ends_at_the_length() -> None:
    table = RandomTable(3)
    assert len(list(table)) == len(table) == 3  # type: ignore[call-overload]


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


# -- Zipf ranks and the alias sampler -------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 1.2, 2.0])
def test_frequencies_fall_with_the_power(exponent: float) -> None:
    draws = (np.arange(200_000) + 0.5) / 200_000
    ranks = Zipf([1000], exponent).ranks(draws[:, None])[:, 0]
    counts = np.bincount(ranks, minlength=1000)
    edges = np.arange(1, 1002.0)
    areas = np.diff(np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent))
    assert np.abs(counts - areas / areas.sum() * 200_000).max() <= 1.01


def test_each_column_has_its_size() -> None:
    ranks = Zipf([1, 7, 10**12], 1.1).ranks(np.random.default_rng(0).random((5_000, 3)))
    assert ranks.min(0).tolist() == [0, 0, 0]
    assert ranks.max(0)[:2].tolist() == [0, 6]
    assert 10**6 < ranks[:, 2].max() < 10**12


@pytest.mark.parametrize("exponent", [1.0, 1.1])
def test_the_largest_draw_stays_inside(exponent: float) -> None:
    assert Zipf([10**9], exponent).ranks(np.array([[1.0]])).item() == 10**9 - 1


def test_a_negative_exponent_is_refused() -> None:
    with pytest.raises(ConfigError, match="zipf=-1, expected 0"):
        Zipf([3], -1)


@pytest.mark.parametrize(
    "weights", [[1.0], [3, 1], [0, 5, 0, 1], [0.1] * 7, [2.0**-i for i in range(40)]]
)
def test_alias_sampler_draws_exact_shares(weights: list[float]) -> None:
    weighted = AliasSampler(np.array(weights, np.float64))
    # evenly spread bits: the share of bits per number equals its share of the bins
    even = np.arange(400_000, dtype=np.uint64) * np.uint64(2**64 // 400_000)
    counts = np.bincount(weighted.draw(even), minlength=len(weights))
    shares = np.array(weights) / np.sum(weights)
    assert np.abs(counts / len(even) - shares).max() < 1e-4
    assert not counts[shares == 0].any()
