# SPDX-License-Identifier: Apache-2.0
"""Texts as word ids."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.simulated import Workers, counting, in_processes
from torch.utils.data import DataLoader

from fleetlight.data import Corpus, Pairs, SkipGram, Vocabulary
from fleetlight.data.words.corpus import topic_text
from fleetlight.errors import ConfigError, DataError

TEXT = "The cat, the dog.\nIt's the DOG's cat: a cat\n\nxyz\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def text_of(corpus: Corpus) -> str:
    words = [*corpus.vocabulary.words, "|"]
    return " ".join(words[token] for token in corpus.tokens)


def test_a_corpus_has_words_and_line_ends(path: Path) -> None:
    corpus = Corpus(path, min_count=1)
    assert text_of(corpus) == "the cat the dog | it's the dog's cat a cat | xyz |"
    assert corpus.vocabulary.words[:3] == ["cat", "the", "a"]
    assert repr(corpus) == "<text: 11 words, 7 different>"


def test_rare_words_are_dropped(path: Path) -> None:
    assert text_of(Corpus(path, min_count=2)) == "the cat the | the cat cat | |"
    assert text_of(Corpus(path, min_count=1, limit=1)) == "cat | cat cat | |"


def test_a_saved_vocabulary_is_used(path: Path) -> None:
    corpus = Corpus(path, vocabulary=Vocabulary(["dog", "cat", "cow"], [5, 5, 5]))
    assert (corpus.tokens >= 0).sum() == len(corpus) == 4
    assert text_of(corpus) == "cat dog | cat cat | |"


def test_a_custom_split_is_used(path: Path) -> None:
    assert text_of(Corpus(path, min_count=1, split=str.split)).startswith("The cat, the dog. |")


def test_several_files_are_concatenated(path: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("the cow\n")
    assert text_of(Corpus([path, tmp_path / "more.txt"], min_count=1)).endswith("| the cow |")
    assert len(Corpus(f"{tmp_path}/*.txt", min_count=1)) == 13


def test_bytes_that_are_not_text_are_named(path: Path) -> None:
    path.write_bytes(b"fine\nna\xefve\n")
    with pytest.raises(DataError, match=r"text\.txt, line 2: UnicodeDecodeError"):
        Corpus(path)


def test_a_corpus_without_frequent_words_is_refused(path: Path) -> None:
    with pytest.raises(DataError, match=r"no word of .* is seen 9 times"):
        Corpus(path, min_count=9)


def test_absent_text_is_named_or_replaced_by_a_stand_in(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"text: nothing found in .*gone.*stand_in=True"):
        Corpus(tmp_path / "gone")
    with pytest.raises(DataError, match="not a file"):
        Corpus([tmp_path / "gone"], stand_in=True)
    corpus = Corpus(tmp_path / "gone", stand_in=True)
    assert corpus.generated
    assert repr(corpus) == "<text (generated stand-in): 400000 words, 2000 different>"
    assert corpus.vocabulary.words[0].endswith("_0")


def test_generated_lines_have_topics_and_word_frequencies() -> None:
    words, lines = topic_text(2_000, vocabulary=100, topics=5, seed=0)
    assert (len(words), lines.shape) == (100, (2_000, 20))
    assert words[:2] == ["topic0_0", "topic0_1"]
    topics = lines // 20
    shares = [np.bincount(line, minlength=5).max() / 20 for line in topics]
    assert 0.75 < np.mean(shares) < 0.95
    counts = np.bincount(lines.ravel(), minlength=100).reshape(5, 20)
    assert (counts[:, 0] > 5 * counts[:, 19]).all()
    assert counts.sum(1).min() > 0.8 * counts.sum(1).max()


def test_generated_text_depends_on_the_seed_only() -> None:
    one, again, other = (topic_text(10, 100, 5, seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


# -- words and their ranks ------------------------------------------------------------------------


def test_words_are_ranked_by_frequency_then_alphabet() -> None:
    seen = {"b": 3, "rare": 1, "a": 3, "often": 9}
    words = Vocabulary.ranked(list(seen), seen.values(), min_count=2, limit=None)
    assert (words.words, words.counts.tolist()) == (["often", "a", "b"], [9, 3, 3])
    assert (len(words), words["a"], "rare" in words) == (3, 1, False)
    assert words.ids(["b", "rare", "often"]).tolist() == [2, -1, 0]
    assert Vocabulary.ranked(list(seen), seen.values(), 1, limit=2).words == ["often", "a"]


def test_a_saved_vocabulary_is_loaded(tmp_path: Path) -> None:
    Vocabulary(["ärger", "c++", "a b"], [3, 2, 1]).save(tmp_path / "words.txt")
    words = Vocabulary.load(tmp_path / "words.txt")
    assert (words.words, words.counts.tolist()) == (["ärger", "c++", "a b"], [3, 2, 1])


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the 12\nand\n")
    with pytest.raises(DataError, match=r"words\.txt, line 2: got 'and', expected a word and"):
        Vocabulary.load(tmp_path / "words.txt")


def test_a_repeated_word_is_refused() -> None:
    with pytest.raises(DataError, match="got 2 words, 1 of them different, with 2 counts"):
        Vocabulary(["a", "a"], [1, 2])


# -- pairs of words within a window ---------------------------------------------------------------


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
