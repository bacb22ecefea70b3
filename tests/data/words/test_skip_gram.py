# SPDX-License-Identifier: Apache-2.0
"""Pairs of words within a window."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.simulated import Workers, counting, in_processes
from torch.utils.data import DataLoader

from fleetlight.data import Corpus, Pairs, SkipGram
from fleetlight.errors import ConfigError


def corpus_of(folder: Path, text: str) -> Corpus:
    (folder / "text.txt").write_text(text)
    return Corpus(folder / "text.txt", min_count=1)


@pytest.fixture
def long(tmp_path: Path) -> Corpus:
    """Longer than one chunk of the text, with very different word frequencies."""
    words = (50 * np.random.default_rng(0).random((4_000, 20)) ** 3).astype(int)
    return corpus_of(tmp_path, "\n".join(" ".join(f"w{w}" for w in line) for line in words))


def words_of(corpus: Corpus, ids: torch.Tensor) -> list[str]:
    return [corpus.vocabulary.words[i] for i in ids]


def everything(data: SkipGram) -> Pairs:
    return data.collate(list(data))


def test_all_pairs_within_a_window_are_formed(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, "a b c\nd e\n")
    pairs = everything(SkipGram(corpus, window=1, subsample=0))
    both = zip(words_of(corpus, pairs.centre), words_of(corpus, pairs.context), strict=True)
    assert sorted(map("".join, both)) == ["ab", "ba", "bc", "cb", "de", "ed"]


def test_near_words_are_paired_more_often(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, "a b c d\n" * 4_000)
    pairs = everything(SkipGram(corpus, window=3, subsample=0))
    rows = zip(words_of(corpus, pairs.centre), words_of(corpus, pairs.context), strict=True)
    counts = Counter(map("".join, rows))
    # the window is 1, 2 or 3 for each centre word
    assert [counts[p] / 4_000 for p in ("ab", "ac", "ad")] == pytest.approx(
        [1, 2 / 3, 1 / 3], abs=0.05
    )
    assert counts["da"] / 4_000 == pytest.approx(1 / 3, abs=0.05)


def test_frequent_words_are_subsampled(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, " ".join(["the"] * 9 + ["x"]) + "\n" + "the y\n" * 1_000)
    data = SkipGram(corpus, window=1, subsample=0.01)
    share = corpus.vocabulary.counts[0] / len(corpus)
    expected = np.sqrt(0.01 / share) + 0.01 / share
    paired = (everything(data).centre == corpus.vocabulary["the"]).sum().item()
    share_of_y = np.sqrt(0.01 / (1 - share)) + 0.01 / (1 - share)
    assert paired / 1_000 == pytest.approx(expected * share_of_y, rel=0.5)


def test_negatives_are_drawn_by_frequency_and_are_not_the_context(long: Corpus) -> None:
    pairs = everything(SkipGram(long, negatives=3))
    assert pairs.negatives.shape == (len(pairs.centre), 3)
    assert not (pairs.negatives == pairs.context[:, None]).any()
    counts = torch.bincount(pairs.negatives.ravel(), minlength=50)
    weights = long.vocabulary.counts**0.75
    rare = slice(20, 50)  # contexts are hardly ever rare words, so these are not redrawn
    got = counts[rare].numpy() / counts[rare].sum().item()
    assert got == pytest.approx(weights[rare] / weights[rare].sum(), rel=0.1)
    # next to the most frequent word, the others keep their shares
    beside = torch.bincount(pairs.negatives[pairs.context == 0].ravel(), minlength=50)[1:10]
    shares = weights[1:] / weights[1:].sum()
    assert (beside / beside.sum()).numpy() == pytest.approx(shares[:9] / shares[:9].sum(), rel=0.15)


def test_seed_and_epoch_decide_the_pairs(long: Corpus) -> None:
    def run(seed: int, epoch: int) -> Pairs:
        data = SkipGram(long, seed=seed)
        data.set_epoch(epoch)
        return everything(data)

    first, again = run(0, 0), run(0, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (run(0, 1), run(1, 0)):
        assert not torch.equal(first.centre[:100], other.centre[:100])
        assert not torch.equal(first.negatives[:100], other.negatives[:100])


def test_every_chunk_of_the_text_is_used(long: Corpus) -> None:
    places = np.array(list(SkipGram(long, window=2, subsample=0))) >> 17
    assert places.max() > 1 << 16
    assert np.array_equal(np.unique(places), np.flatnonzero(long.tokens >= 0))


@pytest.mark.slow
@in_processes
def test_workers_share_the_pairs(long: Corpus, processes: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(SkipGram(long, window=2), 5_000, collate_fn=list, **processes)

    alone, two = Workers(make, 1), Workers(make, 2)
    for epoch in range(2):
        data = SkipGram(long, window=2)
        data.set_epoch(epoch)
        pairs = sorted(data)
        assert sorted(counting(alone.epoch())) == pairs
        assert sorted(counting(two.epoch())) == pairs


@pytest.mark.slow
@in_processes
def test_a_pair_has_equal_negatives_in_every_process(
    long: Corpus, processes: dict[str, Any]
) -> None:
    """Also in loading processes that started in another epoch."""

    def drawn(loader: DataLoader[Any]) -> set[tuple[Any, ...]]:
        return {
            (centre, context, *negatives)
            for batch in loader
            for centre, context, negatives in zip(*(c.tolist() for c in batch), strict=True)
        }

    data, alone = SkipGram(long, window=2), SkipGram(long, window=2)
    loader = data.loader(5_000, **processes)
    for epoch in (0, 1):
        data.set_epoch(epoch)
        alone.set_epoch(epoch)
        assert drawn(loader) == drawn(alone.loader(70_000))


def test_a_batch_has_centres_contexts_and_negatives(long: Corpus) -> None:
    batch = next(iter(SkipGram(long, negatives=4).loader(32)))
    assert [(tuple(column.shape), column.dtype) for column in batch] == [
        *(((32,), torch.int64), ((32,), torch.int64), ((32, 4), torch.int64))
    ]
    assert SkipGram(long, negatives=0).collate(list(SkipGram(long))[:3]).negatives.shape == (3, 0)


def test_wrong_settings_are_refused(tmp_path: Path, long: Corpus) -> None:
    for wrong in ({"window": 0}, {"negatives": -1}, {"subsample": -0.1}):
        with pytest.raises(ConfigError, match="expected a window from 1 to 65535"):
            SkipGram(long, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two different words"):
        SkipGram(corpus_of(tmp_path, "one one\n"))
