# SPDX-License-Identifier: Apache-2.0
"""`Vocabulary`: the words of a text by frequency; a word's id is its rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.readers.lines import lines_of, located
from fleetlight.errors import DataError


class Vocabulary:
    """Words and how often they were seen, the most frequent first.

    Args:
        words: the words; the id of each is its place.
        counts: how often each was seen.

    Raises:
        DataError: a word is there twice, or counts are missing.

    Example:
        >>> words = fleet.data.Vocabulary(["the", "cat"], [10, 3])
        >>> words.ids(["cat", "dog"]).tolist()
        [1, -1]
    """

    def __init__(self, words: Sequence[str], counts: Iterable[int]) -> None:
        self.words = list(words)
        self.counts: NDArray[np.int64] = np.asarray(list(counts), np.int64)
        self._ranks = {word: rank for rank, word in enumerate(self.words)}
        if len(self._ranks) != len(self.counts):
            raise DataError(
                f"got {len(self.words)} words, {len(self._ranks)} of them different, with "
                f"{len(self.counts)} counts; expected each word once, with its count"
            )

    @classmethod
    def ranked(
        cls, words: Sequence[str], counts: Iterable[int], min_count: int, limit: int | None
    ) -> Vocabulary:
        """The `limit` most frequent of the words seen at least `min_count` times.

        Words with equal counts are sorted by name, so that every worker gets the same ranks.
        """
        seen = [pair for pair in zip(words, counts, strict=True) if pair[1] >= min_count]
        seen.sort(key=lambda pair: (-pair[1], pair[0]))
        seen = seen[:limit]
        return cls([word for word, _ in seen], [count for _, count in seen])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a file of `save`: a word and its count on each line."""
        parts = [located(_parse, [line]) for line in lines_of(os.fspath(path))]
        return cls([word for word, _ in parts], [count for _, count in parts])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a text file."""
        with open(path, "w", encoding="utf-8") as file:
            for word, count in zip(self.words, self.counts.tolist(), strict=True):
                file.write(f"{word} {count}\n")

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._ranks

    def __getitem__(self, word: str) -> int:
        """A word's id."""
        return self._ranks[word]

    def ids(self, words: Iterable[str]) -> NDArray[np.int64]:
        """The ids of words, -1 for unknown ones."""
        return np.fromiter((self._ranks.get(word, -1) for word in words), np.int64)

    def __repr__(self) -> str:
        return f"<{len(self)} words, seen {self.counts.sum()} times>"


def _parse(lines: list[bytes]) -> tuple[str, int]:
    word, _, count = lines[0].decode().rstrip().rpartition(" ")
    if not word or not count.isdecimal():
        raise DataError(f"got {lines[0].decode().rstrip()!r}, expected a word and its count")
    return word, int(count)
