# SPDX-License-Identifier: Apache-2.0
"""`ImageTransform`: from uint8 images to the input of a model."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

Channels = tuple[float, float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Crop, flip, resize and normalise whole batches `[B, C, H, W]`.

    Random numbers come from torch's global generator: `torch.manual_seed` and the state in a
    checkpoint govern them.
    """

    #: side of the square to crop, at the centre or (`augment`) at random
    crop: int | None = None
    #: black border added on each side before the crop
    padding: int = 0
    #: crop at random, and flip half of the images left to right
    augment: bool = False
    #: side of the final square
    resize: int | None = None
    #: per channel (mean, standard deviation) to subtract and divide by
    normalise: tuple[Channels, Channels] | None = None

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """float32 images; crop and flip come first, because uint8 is cheaper."""
        if self.crop is not None:
            images = self._cropped(images, self.crop)
        if self.augment:
            images = _random_flip(images)
        images = images.to(torch.float32).div_(255)
        if self.resize is not None:
            side = (self.resize, self.resize)
            images = F.interpolate(images, side, mode="bilinear", antialias=True)
        if self.normalise is not None:
            mean, std = (torch.tensor(values).view(-1, 1, 1) for values in self.normalise)
            images = images.sub_(mean).div_(std)
        return images

    def _cropped(self, images: torch.Tensor, side: int) -> torch.Tensor:
        images = F.pad(images, [self.padding] * 4)
        count, _, height, width = images.shape
        free = torch.tensor([[height - side], [width - side]])
        if self.augment:
            top, left = (torch.rand(2, count) * (free + 1)).long()
        else:
            top, left = (free // 2).expand(2, count)
        windows = images.unfold(2, side, 1).unfold(3, side, 1)
        return windows[torch.arange(count), :, top, left]


def _random_flip(images: torch.Tensor) -> torch.Tensor:
    flip = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(flip, images.flip(-1), images)
