# SPDX-License-Identifier: Apache-2.0
"""Words and their ranks."""

from pathlib import Path

import pytest

from fleetlight.data import Vocabulary
from fleetlight.errors import DataError


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
