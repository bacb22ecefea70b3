# SPDX-License-Identifier: Apache-2.0
"""`ImageDataset`: uint8 images and their labels as a torch data set of float images."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fleetlight.data.readers.images.transform import ImageTransform

Sample = tuple[torch.Tensor, int]


class Images(Protocol):
    """Images of one shape: an array in memory, or an object that makes them on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int], /) -> NDArray[np.uint8]:
        """A new array `[len(indices), C, H, W]`."""
        ...


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """The images and labels that a reader found or generated."""

    images: Images
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    generated: bool = False


class ImageDataset(Dataset[Sample]):
    """Map-style data set of `(float32 [C, H, W], label)`.

    Args:
        name: the name in errors and logs.
        source: the images and their labels; the readers of `fleet.data` find them.
        transform: crops, flips, resizes and normalises images.

    Example:
        >>> digits = fleet.data.MNIST("absent", train=False, stand_in=True)
        >>> isinstance(digits, fleet.data.ImageDataset), digits.generated
        (True, True)
    """

    def __init__(self, name: str, source: ImageSource, transform: ImageTransform) -> None:
        #: True where the files were absent and these images are generated
        self.generated = source.generated
        self.name = f"{name} (generated stand-in)" if source.generated else name
        self.classes = source.classes
        self.labels = source.labels
        self._images = source.images
        self._transform = transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Several samples at once, as DataLoader requests them."""
        images = self._transform(torch.from_numpy(self._images[indices]))
        return list(zip(images.unbind(), self.labels[indices].tolist(), strict=True))

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self)} images, {len(self.classes)} classes>"
