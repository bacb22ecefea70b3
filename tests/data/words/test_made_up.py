# SPDX-License-Identifier: Apache-2.0
"""Generated text."""

from __future__ import annotations

import numpy as np

from fleetlight.data.words.made_up import topic_text


def test_lines_have_topics_and_words_frequencies() -> None:
    words, lines = topic_text(2_000, vocabulary=100, topics=5, seed=0)
    assert (len(words), lines.shape) == (100, (2_000, 20))
    assert words[:2] == ["topic0_0", "topic0_1"]
    topics = lines // 20
    shares = [np.bincount(line, minlength=5).max() / 20 for line in topics]
    assert 0.75 < np.mean(shares) < 0.95
    counts = np.bincount(lines.ravel(), minlength=100).reshape(5, 20)
    assert (counts[:, 0] > 5 * counts[:, 19]).all()
    assert counts.sum(1).min() > 0.8 * counts.sum(1).max()


def test_it_depends_on_the_seed_only() -> None:
    one, again, other = (topic_text(10, 100, 5, seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
