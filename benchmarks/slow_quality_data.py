# SPDX-License-Identifier: Apache-2.0
"""Real records and small models for the quality of the settings for slow networks."""

from __future__ import annotations

import dataclasses
import io
import math
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.jobs import BenchmarkError
from fleetlight.data import MNIST
from fleetlight.data.records import TableDataset

#: names of modes
SYNC, AGAIN, DGC = "synchronous", "synchronous again", "DGC, 0.1 %"
#: characters that the transformer sees
CONTEXT = 64
#: channels of the convolutions
WIDTHS = (32, 64, 128)
#: of the digits and of the text, what is kept for the test
HELD_BACK = {"digits": 0.2, "text": 0.1}


class Example(NamedTuple):
    """What is seen, and what is to be said of it."""

    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Task:
    """Records to train and to test on, a model, and the usual way to train it."""

    title: str
    #: reads the records from a folder: to train on, to test on
    read: Callable[[Path, int], tuple[Example, Example]]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    #: a worker's
    batch: int
    epochs: int
    #: a classifier's accuracy counts, of a text the loss
    classifies: bool = True
    #: SGD with momentum, which DGC asks for
    has_momentum: bool = True
    #: the modes that are looked at, if not all
    only: tuple[str, ...] = ()


def digits(data: Path, seed: int) -> tuple[Example, Example]:
    """Handwritten digits, split anew with every seed."""
    path = _found(data, "t10k-images-idx3-ubyte*")
    images = MNIST(path.parent, train=False)
    x, y = zip(*(images[number] for number in range(len(images))), strict=True)
    return _split(Example(_scaled(torch.stack(x)), torch.tensor(y)), HELD_BACK["digits"], seed)


def cifar(data: Path, seed: int) -> tuple[Example, Example]:
    """Photographs of ten classes from a tar of JPEGs, `train/<class>/` and `test/<class>/`."""
    del seed  # they come with their own split
    x: dict[str, list[Tensor]] = {"train": [], "test": []}
    y: dict[str, list[str]] = {"train": [], "test": []}
    with tarfile.open(_found(data, "cifar10*.tar")) as tar:
        for member in tar:
            if member.name.endswith(".jpg") and (file := tar.extractfile(member)):
                split, label, _ = member.name.split("/")[-3:]
                x[split].append(_pixels(file.read()))
                y[split].append(label)
    classes = {label: number for number, label in enumerate(sorted(set(y["train"])))}
    train, test = (
        Example(
            _scaled(torch.stack(x[split])), torch.tensor([classes[label] for label in y[split]])
        )
        for split in ("train", "test")
    )
    return train, test


def text(data: Path, seed: int) -> tuple[Example, Example]:
    """Pieces of a text, each character to be guessed from those before it."""
    del seed  # the end of the text is for the test
    raw = np.frombuffer(_found(data, "input.txt").read_bytes(), np.uint8)
    letters = torch.from_numpy(np.unique(raw, return_inverse=True)[1].astype(np.int64))
    count = (len(letters) - 1) // CONTEXT
    x, y = (letters[shift : shift + count * CONTEXT].view(count, CONTEXT) for shift in (0, 1))
    cut = int(count * (1 - HELD_BACK["text"]))
    return Example(x[:cut], y[:cut]), Example(x[cut:], y[cut:])


def _pixels(jpeg: bytes) -> Tensor:
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous().float() / 255


def _scaled(images: Tensor) -> Tensor:
    """Each channel with mean 0 and deviation 1."""
    over = (0, 2, 3)
    return (images - images.mean(over, keepdim=True)) / images.std(over, keepdim=True)


def _split(records: Example, part: float, seed: int) -> tuple[Example, Example]:
    order = torch.randperm(len(records.y), generator=torch.Generator().manual_seed(seed))
    cut = int(len(order) * part)
    test, train = (
        Example(*(column[of] for column in records)) for of in (order[:cut], order[cut:])
    )
    return train, test


def _found(data: Path, pattern: str) -> Path:
    found = sorted(data.rglob(pattern))
    if not found:
        raise BenchmarkError(f"no {pattern} in {data} or below; give --data another folder")
    return found[0]


def convolutions(channels: int, widths: tuple[int, ...]) -> nn.Sequential:
    """3x3 convolutions of stride 2 with batch norm, and a linear layer."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip((channels, *widths), widths, strict=False):
        layers.append(nn.Conv2d(fan_in, fan_out, 3, stride=2, padding=1, bias=False))
        layers += [nn.BatchNorm2d(fan_out), nn.ReLU(inplace=True)]
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * widths[-1], 10))
    return nn.Sequential(*layers, *head)


class Transformer(nn.Module):
    """Guesses each character from those before it."""

    def __init__(self, letters: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            *(width, heads, 4 * width),
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), -math.inf).triu(1), False)

    def forward(self, x: Tensor) -> Tensor:
        """Log-odds of the next character, at each place."""
        hidden = self.letters(x) + self.places
        out: Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return out


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """The mean over records, or over the characters of all pieces."""
    return cross_entropy(output.flatten(0, -2), y.flatten())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual one of classifiers."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)


def steep_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As far as a transformer comes without Adam."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, nesterov=True)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual one of transformers."""
    return torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)


def _digits_model() -> nn.Module:
    return convolutions(1, WIDTHS)


def _cifar_model() -> nn.Module:
    return convolutions(3, WIDTHS)


def _text_model() -> nn.Module:
    return Transformer(65, width=64, heads=4, layers=2)


TASKS = {
    "digits": Task("Handwritten digits (MNIST)", digits, _digits_model, sgd, 32, 8),
    "cifar": Task("Photographs (CIFAR-10)", cifar, _cifar_model, sgd, 32, 12),
    "text": Task(
        *("Shakespeare's characters", text, _text_model, adamw, 16, 2),
        classifies=False,
        has_momentum=False,
    ),
    "text-sgd": Task(
        *("Shakespeare's characters, by momentum SGD", text, _text_model, steep_sgd, 16, 2),
        classifies=False,
        only=(SYNC, AGAIN, DGC),
    ),
}


def tables(task: str, folder: Path) -> tuple[TableDataset[Example], TableDataset[Example]]:
    """The records that `put` has left in a folder."""
    one = torch.load(folder / f"{task}.pt", weights_only=True)
    train, test = (TableDataset(task, Example(*one[split])) for split in ("train", "test"))
    return train, test


def put(task: str, data: Path, seed: int, folder: Path) -> None:
    """Read the records once, for all workers of all jobs."""
    train, test = TASKS[task].read(data, seed)
    torch.save({"train": tuple(train), "test": tuple(test)}, folder / f"{task}.pt")
