# SPDX-License-Identifier: Apache-2.0
"""FleetX' cluster quick start: collective training of a static program."""

import torch
from small_resnet import ResNet, flowers
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight import static

base_lr = 0.1
momentum_rate = 0.9
l2_decay = 1e-4
epoch = 3
batch_size = 32


def optimizer_setting(parameter_list: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameter_list, lr=base_lr, momentum=momentum_rate, weight_decay=l2_decay
    )


def train_resnet() -> None:
    print("Start collective training example:")
    image = static.data(name="x", shape=[None, 3, 16, 16], dtype="float32")
    label = static.data(name="y", shape=[None, 1], dtype="int64")
    model = ResNet()
    out = model.net(input=image)
    avg_cost = F.cross_entropy(out, label.flatten())
    acc_top1 = static.accuracy(input=out, label=label, k=1)
    acc_top5 = static.accuracy(input=out, label=label, k=5)
    place = torch.device("cpu")
    print(f"Run on {place}.")

    strategy = fleet.DistributedStrategy()
    fleet.init(is_collective=True, strategy=strategy)
    loader = fleet.shard(DataLoader(flowers(), batch_size=batch_size, drop_last=True, shuffle=True))
    train_loader = static.bind(loader, [image, label])
    optimizer = fleet.distributed_optimizer(optimizer_setting(list(model.parameters())))
    optimizer.minimize(avg_cost)

    exe = static.Executor(place)
    print("Execute startup program.")
    exe.run(static.default_startup_program())
    for eop in range(epoch):
        for batch_id, data in enumerate(train_loader()):
            loss, acc1, acc5 = exe.run(
                static.default_main_program(),
                feed=data,
                fetch_list=[avg_cost.name, acc_top1.name, acc_top5.name],
            )
            if batch_id % 5 == 0:
                print(
                    f"[Epoch {eop}, batch {batch_id}] loss: {loss:.5f}, acc1: {acc1:.5f}, "
                    f"acc5: {acc5:.5f}",
                    flush=True,
                )


if __name__ == "__main__":
    train_resnet()
