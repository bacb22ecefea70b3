# SPDX-License-Identifier: Apache-2.0
"""`Corpus`: a text as the ids of its words."""

from __future__ import annotations

import collections
import os
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.generated.distributions import Zipf
from fleetlight.data.random_bits import key_of
from fleetlight.data.readers.files import refuse_absent
from fleetlight.data.readers.lines import Paths, existing, lines_of, located
from fleetlight.data.words.vocabulary import Vocabulary
from fleetlight.errors import DataError

#: the token after each line
LINE_END = -1
_WORD = re.compile(r"\w+(?:['’]\w+)*")
#: lines, words and topics of the stand-in
_STAND_IN = (20_000, 2_000, 20)
#: words of a line of the stand-in, and the share of them that is of the line's topic
_LINE, _TOPIC_SHARE = 20, 0.8


def words_of(line: str) -> list[str]:
    """Words of letters and digits in lower case; apostrophes inside a word stay."""
    return _WORD.findall(line.lower())


class Corpus:
    r"""Texts as word ids in memory, 4 bytes for each.

    Words seen less than `min_count` times, or not among the `limit` most frequent, are omitted.
    `vocabulary` fixes the words instead, such as those of an earlier run. `split` cuts a line into
    words.

    Args:
        files: a file, a pattern, or a list of these.
        min_count: how often a word must be seen.
        limit: the most words.
        vocabulary: fixes the words.
        split: cuts a line into words.
        stand_in: True generates a text where the files are absent.
        seed: the seed of a generated text.

    Raises:
        DataError: there is no file, or no word is left.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("text.txt").write_text("the cat sat on the mat\n")
        >>> fleet.data.Corpus("text.txt", min_count=1)
        <text: 6 words, 5 different>
    """

    def __init__(
        self,
        files: Paths,
        *,
        min_count: int = 5,
        limit: int | None = None,
        vocabulary: Vocabulary | None = None,
        split: Callable[[str], Iterable[str]] = words_of,
        stand_in: bool = False,
        seed: int = 0,
    ) -> None:
        #: True where the files were absent and this text is generated
        self.generated = _is_absent(files)
        self.name = "text (generated stand-in)" if self.generated else "text"
        if self.generated:
            refuse_absent("text", Path(str(files)), "", stand_in)
            words, numbers = _generated(seed)
        else:
            words, numbers = _read(existing(files), split)
        if vocabulary is None:
            counts = np.bincount(numbers[numbers >= 0], minlength=len(words)).tolist()
            vocabulary = Vocabulary.ranked(words, counts, min_count, limit)
        self.vocabulary = vocabulary
        #: word ids, and `LINE_END` after each line
        self.tokens: NDArray[np.int32] = _renumbered(numbers, vocabulary.ids(words))
        if not len(self):
            raise DataError(
                f"{self.name}: no word of {files} is seen {min_count} times; lower min_count"
            )

    def __len__(self) -> int:
        """The number of words, without those omitted."""
        return int(np.count_nonzero(self.tokens >= 0))

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self)} words, {len(self.vocabulary)} different>"


def _is_absent(files: Paths) -> bool:
    """True for a name or pattern without a file; files of a list must exist."""
    if not isinstance(files, (str, os.PathLike)):
        return False
    try:
        existing(files)
    except DataError:
        return True
    return False


def _read(
    files: Sequence[str], split: Callable[[str], Iterable[str]]
) -> tuple[list[str], NDArray[np.int32]]:
    """The different words, and the text as indices into their list."""
    places: collections.defaultdict[str, int] = collections.defaultdict()
    places.default_factory = places.__len__
    text = array("i")

    def number(lines: list[bytes]) -> None:
        numbers = [places[word] for word in split(lines[0].decode())]
        text.extend(numbers)
        text.append(LINE_END)

    for file in files:
        for line in lines_of(file):
            located(number, [line])
    return list(places), np.frombuffer(text, np.int32)


def _generated(seed: int) -> tuple[list[str], NDArray[np.int32]]:
    words, lines = topic_text(*_STAND_IN, seed)
    ended = np.column_stack([lines, np.full(len(lines), LINE_END)])
    return words, ended.ravel().astype(np.int32)


def _renumbered(numbers: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Replace the numbers of words by their ids; omit words without an id."""
    omitted = -2
    # LINE_END is -1, the index of the last element
    new = np.append(np.where(ids < 0, omitted, ids), LINE_END).astype(np.int32)
    renumbered = new[numbers]
    kept: NDArray[np.int32] = renumbered[renumbered != omitted]
    return kept


def topic_text(
    lines: int, vocabulary: int, topics: int, seed: int
) -> tuple[list[str], NDArray[np.int64]]:
    """Words such as `topic7_12`, and lines of their numbers, `[lines, words of a line]`."""
    rng = np.random.default_rng(int(key_of(seed)))
    size = vocabulary // topics
    topic = rng.integers(topics, size=(lines, _LINE))
    of_line = rng.random((lines, _LINE)) < _TOPIC_SHARE
    topic = np.where(of_line, topic[:, :1], topic)
    rank = Zipf([size], 1.0).ranks(rng.random((lines, _LINE)))
    words = [f"topic{number}_{place}" for number in range(topics) for place in range(size)]
    return words, topic * size + rank
