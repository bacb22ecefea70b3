# SPDX-License-Identifier: Apache-2.0
"""Texts as word ids."""

from pathlib import Path

import numpy as np
import pytest

from fleetlight.data import Corpus, Vocabulary
from fleetlight.data.words.corpus import topic_text
from fleetlight.errors import DataError

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
