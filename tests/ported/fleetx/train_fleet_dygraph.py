# SPDX-License-Identifier: Apache-2.0
"""FleetX' cluster quick start: collective training in an eager loop, in the document's order."""

from collections.abc import Iterator

import torch
from small_resnet import ResNet, flowers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import fleetlight as fleet
from fleetlight import static


class Reader(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields samples one by one, like the document's reader."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for img, label in flowers():
            yield img.reshape(3, 16, 16), label.reshape(1)


def train_resnet() -> None:
    fleet.init(is_collective=True)
    resnet = ResNet()
    optimizer = torch.optim.SGD(resnet.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = fleet.distributed_optimizer(optimizer)
    resnet = fleet.distributed_model(resnet)
    # a separate process prefetches
    loader = DataLoader(Reader(), batch_size=32, drop_last=True, num_workers=1, prefetch_factor=4)
    train_loader = fleet.shard(loader)
    for eop in range(3):
        resnet.train()
        for batch_id, (img, label) in enumerate(train_loader):
            label.requires_grad_(False)
            out = resnet(img)
            avg_loss = F.cross_entropy(out, label.flatten())
            acc_top1 = static.accuracy(input=out, label=label, k=1)
            acc_top5 = static.accuracy(input=out, label=label, k=5)
            dy_out = avg_loss.item()
            avg_loss.backward()
            optimizer.minimize(avg_loss)
            resnet.zero_grad()
            if batch_id % 5 == 0:
                print(
                    f"[Epoch {eop}, batch {batch_id}] loss: {dy_out:.5f}, acc1: {acc_top1:.5f}, "
                    f"acc5: {acc_top5:.5f}",
                    flush=True,
                )


if __name__ == "__main__":
    train_resnet()
