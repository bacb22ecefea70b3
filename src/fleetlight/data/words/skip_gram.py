# SPDX-License-Identifier: Apache-2.0
"""`SkipGram`: pairs of words that stand near each other, and words that do not."""

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
from fleetlight.kernels.hashing import mix

Places = NDArray[np.int64]

#: words that are paired and mixed at a time; no window reaches beyond
_CHUNK_BITS = 16
#: a pair is one number: where its first word stands, and how far from there the second
_DISTANCE_BITS = _CHUNK_BITS + 1
#: word2vec's: between drawing all words alike and drawing them as often as they come
_POWER = 0.75
_ATTEMPTS = 4


class Pairs(NamedTuple):
    """A batch of pairs, ids of words."""

    #: int64 [batch]
    centre: Tensor
    #: int64 [batch], a word that stands near it
    context: Tensor
    #: int64 [batch, negatives], words drawn by frequency^0.75, none of them the context
    negatives: Tensor


class SkipGram(IterableDataset[int]):
    """Streams the pairs of a corpus, mixed; use `loader`, whose batches are `Pairs`.

    As word2vec has it: frequent words are left out at random, a window is at random smaller than
    `window`, and does not cross lines. All of it depends on `seed` and the epoch only. Under
    `fleet.shard` each worker gets its part of every block, and makes the negatives of its own.
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
        """`subsample`: the share of the text above which a word is left out at times; 0: never."""
        if not (1 <= window < 2**_CHUNK_BITS and negatives >= 0 and subsample >= 0):
            raise ConfigError(f"SkipGram: {window=}, {negatives=}, {subsample=} is out of range")
        if len(corpus.vocabulary) < 2:
            raise ConfigError(f"SkipGram: got {corpus!r}, expected two different words or more")
        self._tokens, self._window, self._seed = corpus.tokens, window, seed
        self._negatives, self._words = negatives, len(corpus.vocabulary)
        counts = np.maximum(corpus.vocabulary.counts, 1)
        self._weighted = AliasSampler(counts**_POWER)
        # the last place is that of LINE_END, which is -1
        self._kept = np.append(_chance_to_stay(counts, subsample), 1.0)
        # shared, because loading processes may outlive an epoch
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Draw and mix in the way of this epoch; `fleet.shard` calls it."""
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[int]:
        """The pairs, each as one number that `collate` understands."""
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
        """The pairs of one stretch of the text, mixed."""
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
        """Negatives of each pair; one that is the context itself is drawn again."""
        rows = mix(pairs.view(np.uint64) ^ key_of(self._seed, int(self._epoch)))
        bits = lanes(rows, self._negatives)
        negatives = self._weighted.draw(bits)
        for _ in range(_ATTEMPTS):
            again = negatives == context[:, None]
            bits[again] = mix(bits[again])
            negatives[again] = self._weighted.draw(bits[again])
        # where nearly all of the text is one word
        neighbour = (context + 1) % self._words
        return np.where(negatives == context[:, None], neighbour[:, None], negatives)


def _chance_to_stay(counts: NDArray[np.int64], subsample: float) -> NDArray[np.float64]:
    """The more frequent a word, the more often it is left out."""
    if not subsample:
        return np.ones(len(counts))
    excess = counts / counts.sum() / subsample
    chance: NDArray[np.float64] = np.minimum(1.0, (np.sqrt(excess) + 1.0) / excess)
    return chance


def _numbers(places: Places, lines: Places, reach: Places, window: int) -> Places:
    """All pairs of words in one line that the reach of the first one covers."""
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
    """Where the two words of each pair stand."""
    centres = numbers >> _DISTANCE_BITS
    distances = (numbers & (2**_DISTANCE_BITS - 1)) - 2**_CHUNK_BITS
    return centres, centres + distances
