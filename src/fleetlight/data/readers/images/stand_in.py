# SPDX-License-Identifier: Apache-2.0
"""`StandIn`: generated images in place of absent files, so that a program runs anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.readers.images.dataset import ImageSource
from fleetlight.errors import DataError
from fleetlight.observe.log import logger

_SPLITS = ("train", "valid", "test")
#: pattern and noise together stay below 256
_PATTERN_LEVELS, _NOISE_LEVELS = 28, 228
_PATTERN_CELLS = 4
_NOISE_BANK = 1 << 20


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The shape and size of a data set, for a generated one like it."""

    name: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    counts: Mapping[str, int]

    def for_absent(
        self, root: Path, looked_for: list[str], split: str, allowed: bool, seed: int
    ) -> ImageSource:
        """Generated images where `allowed`, else an error that says how to get them."""
        root = root.absolute()
        there = f"{root}" if root.is_dir() else f"{root} (no such folder)"
        if not allowed:
            raise DataError(
                f"{self.name} {split}: nothing found in {there}; looked for "
                f"{' or '.join(looked_for)}. Put the files there (nothing is downloaded), or pass "
                "stand_in=True for generated images of the same shape"
            )
        logger.warning(
            "%s %s: no files in %s; using GENERATED images, results say nothing about %s",
            *(self.name, split, there, self.name),
        )
        return self.generate(split, seed)

    def generate(self, split: str, seed: int) -> ImageSource:
        """Images that a model can learn: a pattern for each class, in all splits, and noise."""
        patterns = self._patterns(np.random.default_rng([seed, len(_SPLITS)]))
        rng = np.random.default_rng([seed, _SPLITS.index(split)])
        labels = rng.integers(len(self.classes), size=self.counts[split])
        return ImageSource(
            GeneratedImages(patterns, labels, rng), labels, self.classes, generated=True
        )

    def _patterns(self, rng: np.random.Generator) -> NDArray[np.uint8]:
        channels, height, width = self.shape
        cells = (len(self.classes), channels, _PATTERN_CELLS, _PATTERN_CELLS)
        coarse = rng.integers(_PATTERN_LEVELS, size=cells, dtype=np.uint8)
        rows, columns = (np.arange(n) * _PATTERN_CELLS // n for n in (height, width))
        return coarse[:, :, rows[:, None], columns]


class GeneratedImages:
    """Images made on access: the pattern of the class, plus noise of the image."""

    def __init__(
        self, patterns: NDArray[np.uint8], labels: NDArray[np.int64], rng: np.random.Generator
    ) -> None:
        self._patterns = patterns
        self._labels = labels
        # All noise comes from one bank, at a place for each image: no memory per image.
        size = patterns[0].size
        self._noise = rng.integers(_NOISE_LEVELS, size=_NOISE_BANK + size, dtype=np.uint8)
        self._places = rng.integers(_NOISE_BANK, size=len(labels))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, indices: list[int], /) -> NDArray[np.uint8]:
        patterns = self._patterns[self._labels[indices]]
        windows = np.lib.stride_tricks.sliding_window_view(self._noise, patterns[0].size)
        noise: NDArray[np.uint8] = windows[self._places[indices]].reshape(patterns.shape)
        return np.add(patterns, noise)
