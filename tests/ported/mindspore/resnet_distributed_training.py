# SPDX-License-Identifier: Apache-2.0
"""MindSpore's data parallelism on CPUs: a residual network on images like CIFAR-10's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import static

sys.path.insert(0, str(Path(__file__).parents[1] / "fleetx"))
from small_resnet import ResNet


class Cifar10(TensorDataset):
    """Images and labels of a file, shifted and mirrored by chance when they are asked for."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        image, label = super().__getitem__(index)
        top, left = (int(n) for n in torch.randint(0, 5, (2,)))
        image = F.pad(image, (2, 2, 2, 2))[:, top : top + 16, left : left + 16]
        return (image.flip(2) if torch.rand(()) < 0.5 else image), label


def create_dataset(data_path: str, batch_size: int = 32) -> DataLoader[tuple[torch.Tensor, ...]]:
    """The worker's own part of the records."""
    loaded = torch.load(Path(data_path) / "data.pt", weights_only=True)
    data_set = Cifar10(loaded["images"], loaded["labels"])
    print(f"rank {fleet.worker_index()} of {fleet.worker_num()}, {len(data_set)} records in all")
    return fleet.shard(DataLoader(data_set, batch_size=batch_size, drop_last=True, shuffle=True))


def train_resnet(epoch_size: int = 2) -> None:
    """Graph mode: a program, and a line for each step."""
    dataset = create_dataset(os.environ["DATA_PATH"])
    net: nn.Module = ResNet(10)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    opt = fleet.distributed_optimizer(opt)
    example = {"image": torch.zeros(2, 3, 16, 16), "label": torch.zeros(2, dtype=torch.int64)}
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
    fleet.init(is_collective=True, strategy=strategy)
    train_resnet()
