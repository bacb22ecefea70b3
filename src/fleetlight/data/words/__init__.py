# SPDX-License-Identifier: Apache-2.0
"""Texts as numbered words, and the pairs of words that word vectors are trained on."""

from __future__ import annotations

from fleetlight.data.words.corpus import Corpus
from fleetlight.data.words.skip_gram import Pairs, SkipGram
from fleetlight.data.words.vocabulary import Vocabulary

__all__ = ["Corpus", "Pairs", "SkipGram", "Vocabulary"]
