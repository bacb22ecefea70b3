# SPDX-License-Identifier: Apache-2.0
"""uint8 images as a data set."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fleetlight.data.readers.images.dataset import ImageDataset, ImageSource
from fleetlight.data.readers.images.transform import ImageTransform


@pytest.fixture
def dataset() -> ImageDataset:
    images = np.arange(6 * 4, dtype=np.uint8).reshape(6, 1, 2, 2)
    images.setflags(write=False)  # as in an array that is read from a file
    source = ImageSource(images, np.array([0, 1, 2, 0, 1, 2]), ("a", "b", "c"))
    return ImageDataset("letters", source, ImageTransform())


def test_a_sample_is_a_float_image_and_an_int(dataset: ImageDataset) -> None:
    image, label = dataset[4]
    assert torch.equal(image, torch.tensor([[[16.0, 17.0], [18.0, 19.0]]]) / 255)
    assert (label, type(label)) == (1, int)


def test_changing_a_sample_does_not_change_the_data_set(dataset: ImageDataset) -> None:
    before = dataset[0][0].clone()
    dataset[0][0].zero_().add_(7)
    assert torch.equal(dataset[0][0], before)


def test_iteration_ends_at_the_length(dataset: ImageDataset) -> None:
    assert len(dataset) == 6
    assert len(list(dataset)) == 6  # type: ignore[call-overload]
    with pytest.raises(IndexError):
        dataset[6]


def test_a_loader_gets_equal_samples_by_batches(dataset: ImageDataset) -> None:
    loaded = [pair for x, y in DataLoader(dataset, batch_size=4) for pair in zip(x, y, strict=True)]
    for index, (image, label) in enumerate(loaded):
        assert torch.equal(image, dataset[index][0])
        assert label == dataset[index][1]
    assert len(loaded) == 6


def test_the_name_marks_generated_images() -> None:
    source = ImageSource(np.zeros((1, 1, 2, 2), np.uint8), np.array([0]), ("a",), generated=True)
    dataset = ImageDataset("letters", source, ImageTransform())
    assert dataset.generated
    assert repr(dataset) == "<letters (generated stand-in): 1 images, 1 classes>"
