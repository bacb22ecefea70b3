# SPDX-License-Identifier: Apache-2.0
"""Fleet's static quick start, synchronous data parallelism."""

import os

import torch
from digits_model import mnist_on_mlp_model
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight import static

train_data, test_data, x, y, cost, acc = mnist_on_mlp_model()
place = torch.device("cuda" if "FLAGS_selected_gpus" in os.environ else "cpu")
fleet.init(is_collective=True)
train_dataloader = static.bind(
    fleet.shard(DataLoader(train_data, batch_size=64, shuffle=True, drop_last=True)), [x, y]
)
strategy = fleet.DistributedStrategy()
optimizer = torch.optim.Adam(static.default_main_program().parameters(), lr=0.001)
optimizer = fleet.distributed_optimizer(optimizer, strategy=strategy)
optimizer.minimize(cost)

exe = static.Executor(place)
exe.run(static.default_startup_program())

epoch = 10
step = 0
for _ in range(epoch):
    for data in train_dataloader():
        step += 1
        loss_val, acc_val = exe.run(
            static.default_main_program(), feed=data, fetch_list=[cost.name, acc.name]
        )
        print(f"step {step} loss: {loss_val:.6f}, acc: {acc_val:.4f}", flush=True)
weights = sum(p.double().abs().sum().item() for p in static.default_main_program().parameters())
print(f"weights {weights:.6f}", flush=True)
