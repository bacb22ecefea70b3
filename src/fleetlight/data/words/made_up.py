# SPDX-License-Identifier: Apache-2.0
"""Generated text: each line is about one topic, so words of a topic stand together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.mixing import key_of
from fleetlight.data.zipf import Zipf

_LINE = 20
#: share of words that belong to the topic of their line; the others are of any
_OF_TOPIC = 0.8


def topic_text(
    lines: int, vocabulary: int, topics: int, seed: int
) -> tuple[list[str], NDArray[np.int64]]:
    """Words such as `topic7_12`, and the lines as their numbers, `[lines, words of a line]`."""
    rng = np.random.default_rng(int(key_of(seed)))
    size = vocabulary // topics
    topic = rng.integers(topics, size=(lines, _LINE))
    of_line = rng.random((lines, _LINE)) < _OF_TOPIC
    topic = np.where(of_line, topic[:, :1], topic)
    rank = Zipf([size], 1.0).ranks(rng.random((lines, _LINE)))
    words = [f"topic{number}_{place}" for number in range(topics) for place in range(size)]
    return words, topic * size + rank
