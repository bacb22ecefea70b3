# SPDX-License-Identifier: Apache-2.0
"""`ImageTransform`: from a batch of uint8 images to what the model eats."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

Channels = tuple[float, float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Crop, flip, resize and normalise whole batches `[B, C, H, W]`.

    Chance comes from torch's global generator: `torch.manual_seed` governs it, and so does the
    random state that a checkpoint carries.
    """

    #: side of the square to cut out, from the centre or (`augment`) from anywhere
    crop: int | None = None
    #: black border added on each side before the crop
    padding: int = 0
    #: crop anywhere and flip half of the images left to right
    augment: bool = False
    #: side of the final square
    resize: int | None = None
    #: per channel (mean, standard deviation) to subtract and divide by
    normalise: tuple[Channels, Channels] | None = None

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """float32 images; crop and flip come first because they are cheaper on uint8."""
        if self.crop is not None:
            images = self._cropped(images, self.crop)
        if self.augment:
            images = _randomly_flipped(images)
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


def _randomly_flipped(images: torch.Tensor) -> torch.Tensor:
    flip = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(flip, images.flip(-1), images)
