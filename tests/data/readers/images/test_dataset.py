# SPDX-License-Identifier: Apache-2.0
"""Uint8 images as a data set: folders, files, transforms and stand-ins."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.readers.images.pictures import write_jpeg
from torch.utils.data import DataLoader

from fleetlight.data.readers.images.dataset import ImageDataset, ImageSource
from fleetlight.data.readers.images.folder import ImageFolder
from fleetlight.data.readers.images.image_files import ImageFiles
from fleetlight.data.readers.images.stand_in import StandIn
from fleetlight.data.readers.images.transform import ImageTransform
from fleetlight.errors import ConfigError, DataError


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


# -- one folder per class -------------------------------------------------------------------------


def test_labels_follow_the_sorted_names(tmp_path: Path) -> None:
    for name in ("wasp/1.jpg", "bee/2.JPG", "bee/1.jpeg"):
        write_jpeg(tmp_path / name, size=(40, 40))
    (tmp_path / "bee" / "notes.txt").touch()
    (tmp_path / ".cache").mkdir()
    data = ImageFolder(tmp_path, size=28)
    assert (data.classes, data.labels.tolist()) == (("bee", "wasp"), [0, 0, 1])
    assert data[0][0].shape == (3, 28, 28)


def test_numbered_classes_sort_by_value(tmp_path: Path) -> None:
    for name in ("10", "9", "100"):
        write_jpeg(tmp_path / name / "a.jpg")
    assert ImageFolder(tmp_path).classes == ("9", "10", "100")


def test_the_crop_is_an_eighth_smaller_than_the_decoded_image(tmp_path: Path) -> None:
    # A black frame of 1/16 around white: a central crop removes it, a random one shows it.
    path = write_jpeg(tmp_path / "a" / "1.jpg", (0, 0, 0), size=(256, 256))
    from PIL import Image

    with Image.open(path) as picture:
        picture.paste((255, 255, 255), (14, 14, 242, 242))
        picture.save(path, quality=100)
    assert ImageFolder(tmp_path)[0][0].min() > 0.9
    torch.manual_seed(0)
    augmented = ImageFolder(tmp_path, augment=True)
    assert min(float(augmented[0][0].min()) for _ in range(5)) < 0.1


def test_normalise_uses_imagenet_statistics(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "a" / "1.jpg", (0, 0, 0))
    image = ImageFolder(tmp_path, size=8, normalise=True)[0][0]
    torch.testing.assert_close(image[0], torch.full((8, 8), -0.485 / 0.229))


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "bee" / "1.jpg")
    (tmp_path / "wasp").mkdir()
    with pytest.raises(DataError, match="wasp: no images found"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("name", [".", "nowhere"])
def test_a_root_without_class_folders_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="no class folders found; expected <class>/<image>"):
        ImageFolder(tmp_path / name)


# -- decoding of image files ----------------------------------------------------------------------


def test_channels_come_first_and_images_in_the_requested_order(tmp_path: Path) -> None:
    paths = [
        write_jpeg(tmp_path / "red.jpg", (255, 0, 0)),
        write_jpeg(tmp_path / "blue.jpg", (0, 0, 255)),
    ]
    pixels = ImageFiles(paths, 32)[[1, 0, 1]]
    assert (pixels.shape, pixels.dtype) == ((3, 3, 32, 32), np.uint8)
    assert pixels.mean((2, 3)).round(-1).tolist() == [[0, 0, 250], [250, 0, 0], [0, 0, 250]]


def test_the_central_square_is_kept(tmp_path: Path) -> None:
    wide = Image.new("RGB", (90, 30))
    wide.paste((255, 255, 255), (30, 0, 60, 30))
    wide.save(tmp_path / "wide.png")
    assert (ImageFiles([tmp_path / "wide.png"], 30)[[0]] == 255).all()


def test_images_are_not_rotated(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8))
    picture.paste((255, 255, 255), (0, 0, 8, 2))
    picture.save(tmp_path / "white_on_top.png")
    pixels = ImageFiles([tmp_path / "white_on_top.png"], 8)[[0]][0]
    assert (pixels[:, :2] == 255).all()
    assert (pixels[:, 2:] == 0).all()


def test_large_photographs_shrink(tmp_path: Path) -> None:
    path = write_jpeg(tmp_path / "large.jpg", (40, 80, 120), size=(1000, 700))
    pixels = ImageFiles([path], 50)[[0]]
    assert pixels.shape == (1, 3, 50, 50)
    assert np.abs(pixels.mean((0, 2, 3)) - [40, 80, 120]).max() < 3


def test_grey_images_get_three_channels(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 100).save(tmp_path / "grey.jpg")
    assert np.abs(ImageFiles([tmp_path / "grey.jpg"], 8)[[0]].astype(int) - 100).max() < 3


def test_a_broken_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = write_jpeg(tmp_path / "cut.jpg", size=(200, 200))
    path.write_bytes(path.read_bytes()[:-300])
    (tmp_path / "text.jpg").write_text("not a picture")
    images = ImageFiles([path, tmp_path / "text.jpg", tmp_path / "gone.jpg"], 8)
    for index, name in enumerate(["cut", "text", "gone"]):
        with pytest.raises(DataError, match=rf"{name}\.jpg: cannot be decoded"):
            images[[index]]


@pytest.mark.parametrize(
    "limit", [1000, 500]
)  # Pillow warns above the limit, and raises above twice the limit
def test_a_decompression_bomb_is_refused(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jpeg(tmp_path / "bomb.jpg", size=(40, 40))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match="exceeds limit"):
        ImageFiles([path], 8)[[0]]


def test_image_files_can_be_pickled(tmp_path: Path) -> None:
    images = ImageFiles([write_jpeg(tmp_path / "a.jpg")], 8)
    assert np.array_equal(pickle.loads(pickle.dumps(images))[[0]], images[[0]])


def test_a_missing_pillow_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"pip install 'fleetlight\[images\]'"):
        ImageFiles([], 8)


# -- the transforms from stored images to model inputs --------------------------------------------


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


# -- generated images -----------------------------------------------------------------------------

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
