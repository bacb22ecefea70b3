# SPDX-License-Identifier: Apache-2.0
"""`SkipGram`: pairs of words near each other, with negatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fleetlight.data.generated.distributions import AliasSampler
from fleetlight.data.random_bits import key_of, lanes
from fleetlight.data.words.corpus import LINE_END, Corpus
from fleetlight.errors import ConfigError
from fleetlight.kernels.ids.hashing import mix

Places = NDArray[np.int64]

#: words that are paired and shuffled at a time; no window crosses their border
_CHUNK_BITS = 16
#: a pair is one number: the place of its first word, and the distance to the second
_DISTANCE_BITS = _CHUNK_BITS + 1
#: as in word2vec: between uniform draws (0) and draws by frequency (1)
_POWER = 0.75
_ATTEMPTS = 4


class Pairs(NamedTuple):
    r"""A batch of pairs, as word ids.

    Args:
        centre: int64 `[batch]`.
        context: int64 `[batch]`, a word near the centre.
        negatives: int64 `[batch, negatives]`, drawn by frequency^0.75, never the context.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("text.txt").write_text("the cat sat on the mat\n")
        >>> corpus = fleet.data.Corpus("text.txt", min_count=1)
        >>> pairs = next(iter(fleet.data.SkipGram(corpus, subsample=0).loader(4)))
        >>> pairs.centre.shape, pairs.negatives.shape
        (torch.Size([4]), torch.Size([4, 5]))
    """

    #: int64 [batch]
    centre: Tensor
    #: int64 [batch], a word near the centre
    context: Tensor
    #: int64 [batch, negatives], drawn by frequency^0.75, never the context
    negatives: Tensor


class SkipGram(IterableDataset[int]):
    r"""Streams the pairs of a corpus, shuffled; use `loader`, whose batches are `Pairs`.

    As in word2vec, frequent words are omitted at random. The size of each window is random, up to
    `window`, and windows do not cross lines. Everything depends on `seed` and the epoch only. Under
    `fleet.shard` each worker gets its part of every block, and draws the negatives of that part.

    Args:
        corpus: the text.
        window: the most words between a word and its context.
        negatives: how many words are drawn for each pair.
        subsample: words with a larger share of the text are omitted at times; 0: never.
        seed: the seed of all draws.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("text.txt").write_text("the cat sat on the mat\n")
        >>> corpus = fleet.data.Corpus("text.txt", min_count=1)
        >>> loader = fleet.data.SkipGram(corpus, negatives=2, subsample=0).loader(4)
        >>> next(iter(loader)).negatives.shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        window: int = 5,
        negatives: int = 5,
        subsample: float = 1e-3,
        seed: int = 0,
    ) -> None:
        """`subsample`: words with a larger share of the text are omitted at times; 0: never."""
        if not (1 <= window < 2**_CHUNK_BITS and negatives >= 0 and subsample >= 0):
            raise ConfigError(
                f"SkipGram: got {window=}, {negatives=}, {subsample=}; expected a window from 1 to "
                f"{2**_CHUNK_BITS - 1}, and the others >= 0"
            )
        if len(corpus.vocabulary) < 2:
            raise ConfigError(f"SkipGram: got {corpus!r}, expected at least two different words")
        self._tokens, self._window, self._seed = corpus.tokens, window, seed
        self._negatives, self._words = negatives, len(corpus.vocabulary)
        counts = np.maximum(corpus.vocabulary.counts, 1)
        self._negative_sampler = AliasSampler(counts**_POWER)
        # LINE_END is -1, the index of the last element
        self._kept = np.append(_probability_to_stay(counts, subsample), 1.0)
        # in shared memory: loading processes may outlive an epoch
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Draw and shuffle as in this epoch; `fleet.shard` calls it."""
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[int]:
        """The pairs, each as one number for `collate`."""
        epoch, info = int(self._epoch), get_worker_info()
        count = -(-len(self._tokens) // 2**_CHUNK_BITS)
        order = np.random.default_rng(int(key_of(self._seed, epoch))).permutation(count)
        mine = order if info is None else order[info.id :: info.num_workers]
        for chunk in mine.tolist():
            yield from self._chunk(epoch, chunk).tolist()

    def collate(self, pairs: Sequence[int]) -> Pairs:
        """For `DataLoader(collate_fn=...)`: the words of these pairs, with their negatives."""
        numbers = np.asarray(pairs, np.int64)
        centres, contexts = _places(numbers)
        context = self._tokens[contexts].astype(np.int64)
        return Pairs(
            torch.from_numpy(self._tokens[centres].astype(np.int64)),
            torch.from_numpy(context),
            torch.from_numpy(self._drawn(numbers, context)),
        )

    def loader(self, batch_size: int, **settings: Any) -> DataLoader[Any]:
        """A DataLoader over batches of pairs."""
        return DataLoader(self, batch_size, collate_fn=self.collate, **settings)

    def _chunk(self, epoch: int, chunk: int) -> Places:
        """The pairs of one chunk of the text, shuffled."""
        first = chunk << _CHUNK_BITS
        tokens = self._tokens[first : first + 2**_CHUNK_BITS]
        rng = np.random.default_rng(int(key_of(self._seed, epoch, chunk)))
        stays = np.flatnonzero(rng.random(len(tokens)) < self._kept[tokens])
        lines = np.cumsum(tokens[stays] == LINE_END)
        is_word = tokens[stays] != LINE_END
        places, lines = stays[is_word], lines[is_word]
        reach = rng.integers(1, self._window + 1, size=len(places))
        return rng.permutation(_numbers(first + places, lines, reach, self._window))

    def _drawn(self, pairs: Places, context: Places) -> Places:
        """Negatives of each pair; the context itself is drawn again."""
        rows = mix(pairs.view(np.uint64) ^ key_of(self._seed, int(self._epoch)))
        bits = lanes(rows, self._negatives)
        negatives = self._negative_sampler.draw(bits)
        for _ in range(_ATTEMPTS):
            again = negatives == context[:, None]
            bits[again] = mix(bits[again])
            negatives[again] = self._negative_sampler.draw(bits[again])
        # needed where one word is nearly all of the text
        other = (context + 1) % self._words
        return np.where(negatives == context[:, None], other[:, None], negatives)


def _probability_to_stay(counts: NDArray[np.int64], subsample: float) -> NDArray[np.float64]:
    """The probability that each word stays; frequent words are omitted more often."""
    if not subsample:
        return np.ones(len(counts))
    excess = counts / counts.sum() / subsample
    stays: NDArray[np.float64] = np.minimum(1.0, (np.sqrt(excess) + 1.0) / excess)
    return stays


def _numbers(places: Places, lines: Places, reach: Places, window: int) -> Places:
    """All pairs of words in a line that the window of the first word covers."""
    found = []
    for step in range(1, min(window, len(places) - 1) + 1):
        left, right = places[:-step], places[step:]
        same = lines[:-step] == lines[step:]
        onward, back = same & (reach[:-step] >= step), same & (reach[step:] >= step)
        found += [_number(left[onward], right[onward]), _number(right[back], left[back])]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _number(centres: Places, contexts: Places) -> Places:
    numbers: Places = (centres << _DISTANCE_BITS) + (contexts - centres + 2**_CHUNK_BITS)
    return numbers


def _places(numbers: Places) -> tuple[Places, Places]:
    """The places of the two words of each pair."""
    centres = numbers >> _DISTANCE_BITS
    distances = (numbers & (2**_DISTANCE_BITS - 1)) - 2**_CHUNK_BITS
    return centres, centres + distances
