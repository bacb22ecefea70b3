# SPDX-License-Identifier: Apache-2.0
"""Generated images."""

import numpy as np
import pytest

from fleetlight.data.readers.images.dataset import ImageSource
from fleetlight.data.readers.images.stand_in import StandIn

STAND_IN = StandIn("letters", (2, 12, 10), tuple("abcd"), {"train": 400, "test": 200})


def everything(source: ImageSource) -> np.ndarray:
    return source.images[list(range(len(source.images)))]


def test_images_have_the_given_shape_and_classes() -> None:
    source = STAND_IN.generate("train", 0)
    images = everything(source)
    assert (images.shape, images.dtype) == ((400, 2, 12, 10), np.uint8)
    assert (source.generated, source.classes) == (True, tuple("abcd"))
    assert set(source.labels.tolist()) == {0, 1, 2, 3}


def test_the_same_seed_gives_the_same_images_in_any_order() -> None:
    one, two = STAND_IN.generate("train", 7), STAND_IN.generate("train", 7)
    assert np.array_equal(one.labels, two.labels)
    assert np.array_equal(one.images[[3, 250, 3]], everything(two)[[3, 250, 3]])


@pytest.mark.parametrize(("split", "seed"), [("test", 7), ("train", 8)])
def test_other_splits_and_seeds_give_other_images(split: str, seed: int) -> None:
    one, two = STAND_IN.generate("train", 7), STAND_IN.generate(split, seed)
    assert not np.array_equal(one.images[list(range(200))], two.images[list(range(200))])
    assert not np.array_equal(one.labels[:200], two.labels[:200])


def test_a_model_of_the_training_set_fits_the_test_set() -> None:
    train, test = STAND_IN.generate("train", 0), STAND_IN.generate("test", 0)
    images, unseen = everything(train).reshape(400, -1), everything(test).reshape(200, -1)
    centres = np.stack([images[train.labels == label].mean(0) for label in range(4)])
    distances = ((unseen[:, None] - centres) ** 2).sum(-1)
    # far above chance, a quarter, and far from perfect, so that training shows progress
    assert 0.6 < (distances.argmin(1) == test.labels).mean() < 0.99


def test_images_of_a_class_differ() -> None:
    source = STAND_IN.generate("train", 0)
    first, second = source.images[np.flatnonzero(source.labels == 0)[:2].tolist()]
    assert not np.array_equal(first, second)
