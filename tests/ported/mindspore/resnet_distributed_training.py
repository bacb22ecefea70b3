# SPDX-License-Identifier: Apache-2.0
"""MindSpore's data parallelism on CPUs: a residual network on images like those of CIFAR-10."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import static

sys.path.insert(0, str(Path(__file__).parents[1] / "fleetx"))
from small_resnet import ResNet

RESIZED = 20
Operation = Callable[[Tensor], Tensor]


def random_crop(image: Tensor) -> Tensor:
    """Crops an image of the same size out of one with a border."""
    padded = F.pad(image, (0, 0, 2, 2, 2, 2))
    top, left = (int(n) for n in torch.randint(0, 5, (2,)))
    return padded[top : top + image.shape[0], left : left + image.shape[1]]


def random_horizontal_flip(image: Tensor) -> Tensor:
    """Mirrors half of the images."""
    return image.flip(1) if torch.rand(()) < 0.5 else image


def resize(image: Tensor) -> Tensor:
    """Resizes an image to a square."""
    chw = image.permute(2, 0, 1)[None].float()
    return F.interpolate(chw, (RESIZED, RESIZED), mode="bilinear")[0].permute(1, 2, 0)


def rescale(image: Tensor) -> Tensor:
    """Scales values to 0 to 1."""
    return image * (1.0 / 255.0) + 0.0


def normalize(image: Tensor) -> Tensor:
    """Centres each channel at 0."""
    mean, deviation = (0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)
    return (image - torch.tensor(mean)) / torch.tensor(deviation)


def hwc2chw(image: Tensor) -> Tensor:
    """Puts channels first, as torch expects."""
    return image.permute(2, 0, 1)


class Cifar10(TensorDataset):
    """Images and labels of a file; transforms run when an image is read."""

    operations: Sequence[Operation] = ()

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, label = super().__getitem__(index)
        for operation in self.operations:
            image = operation(image)
        return image, label


def create_dataset(data_path: str, batch_size: int = 32) -> DataLoader[tuple[Tensor, ...]]:
    """The worker's part of the records."""
    loaded = torch.load(Path(data_path) / "data.pt", weights_only=True)
    # the label is int32 in the document, and int64 for torch's cross entropy
    data_set = Cifar10(loaded["images"], loaded["labels"].to(torch.int64))
    data_set.operations = [random_crop, random_horizontal_flip]
    data_set.operations += [resize, rescale, normalize, hwc2chw]
    print(f"rank {fleet.worker_index()} of {fleet.worker_num()}, {len(data_set)} records in all")
    return fleet.shard(DataLoader(data_set, batch_size=batch_size, drop_last=True, shuffle=True))


def train_resnet(epoch_size: int = 2) -> None:
    """Graph mode: a program, and a line for each step."""
    dataset = create_dataset(os.environ["DATA_PATH"])
    net: nn.Module = ResNet(10)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    opt = fleet.distributed_optimizer(opt)
    example = {
        "image": torch.zeros(2, 3, RESIZED, RESIZED),
        "label": torch.zeros(2, dtype=torch.int64),
    }
    program = static.capture(net, F.cross_entropy, opt, example)
    executor = static.Executor("cpu")
    for epoch in range(epoch_size):
        for step, batch in enumerate(dataset):
            [loss] = executor.run(program, feed=list(batch), fetch_list=["loss"])
            print(f"epoch: {epoch + 1} step: {step + 1}, loss is {loss:.7f}", flush=True)
    weights = sum(p.double().abs().sum().item() for p in net.parameters())
    print(f"weights {weights:.6f}", flush=True)


if __name__ == "__main__":
    strategy = fleet.DistributedStrategy(gradient_scale="mean")
    # enable_ssl: the folder of certificates
    strategy.ssl = os.environ.get("CERTIFICATES")
    fleet.init(is_collective=True, strategy=strategy)
    train_resnet()
