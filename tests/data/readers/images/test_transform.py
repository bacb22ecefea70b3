# SPDX-License-Identifier: Apache-2.0
"""The transforms from stored images to model inputs."""

import pytest
import torch

from fleetlight.data.readers.images.transform import ImageTransform


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)


def test_plain_images_are_floats_from_0_to_1(images: torch.Tensor) -> None:
    before = images.clone()
    out = ImageTransform()(images)
    assert out.dtype == torch.float32
    assert torch.equal(out, images.float() / 255)
    assert torch.equal(images, before)


def test_centre_crop_cuts_the_middle(images: torch.Tensor) -> None:
    assert torch.equal(ImageTransform(crop=4)(images), images[:, :, 2:6, 2:6].float() / 255)


def test_normalise_is_per_channel(images: torch.Tensor) -> None:
    out = ImageTransform(normalise=((0.1, 0.2, 0.3), (0.5, 0.25, 2.0)))(images)
    for channel, (mean, std) in enumerate([(0.1, 0.5), (0.2, 0.25), (0.3, 2.0)]):
        expected = (images[:, channel].float() / 255 - mean) / std
        torch.testing.assert_close(out[:, channel], expected)


def test_resize_keeps_flat_colour() -> None:
    out = ImageTransform(resize=24)(torch.full((2, 3, 8, 8), 51, dtype=torch.uint8))
    assert out.shape == (2, 3, 24, 24)
    torch.testing.assert_close(out, torch.full_like(out, 0.2))


def _places(images: torch.Tensor, out: torch.Tensor) -> list[tuple[int, int, bool]]:
    """Returns where each output was cut in the padded image, and whether it was flipped."""
    padded = torch.nn.functional.pad(images, [2, 2, 2, 2]).float() / 255
    found = []
    for index, image in enumerate(out):
        for flipped in (False, True):
            wanted = image.flip(-1) if flipped else image
            found += [
                (top, left, flipped)
                for top in range(5)
                for left in range(5)
                if torch.equal(padded[index, :, top : top + 8, left : left + 8], wanted)
            ]
    return found


def test_augment_crops_the_padded_image_at_random_and_flips_half() -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (400, 3, 8, 8), dtype=torch.uint8)
    places = _places(images, ImageTransform(crop=8, padding=2, augment=True)(images))
    assert len(places) == 400  # every output is one such cut of its own image
    assert {place[0] for place in places} == set(range(5))
    assert {place[1] for place in places} == set(range(5))
    assert 150 < sum(place[2] for place in places) < 250


def test_height_and_width_are_not_mixed_up() -> None:
    wide = torch.arange(4 * 9, dtype=torch.uint8).reshape(1, 1, 4, 9).expand(50, 1, 4, 9)
    torch.manual_seed(0)
    out = ImageTransform(crop=4, augment=True)(wide).mul(255).round()
    corners = {int(min(image[0, 0, 0], image[0, 0, -1])) for image in out}
    assert corners == set(range(6))  # along the first row, never below it
    assert torch.equal(ImageTransform(crop=4)(wide)[0], wide[0, :, :, 2:6].float() / 255)


def test_random_numbers_come_from_the_global_generator(images: torch.Tensor) -> None:
    transform = ImageTransform(crop=8, padding=4, augment=True)
    torch.manual_seed(3)
    first, second = transform(images), transform(images)
    torch.manual_seed(3)
    assert torch.equal(transform(images), first)
    assert not torch.equal(first, second)
