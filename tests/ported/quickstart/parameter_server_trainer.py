# SPDX-License-Identifier: Apache-2.0
"""Fleet's static quick start, asynchronous parameter servers."""

import torch
from digits_model import mnist_on_mlp_model
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight import static

train_data, test_data, x, y, cost, acc = mnist_on_mlp_model()

fleet.init()
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
optimizer = torch.optim.Adam(static.default_main_program().parameters(), lr=0.001)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
optimizer.minimize(cost)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    place = torch.device("cpu")
    exe = static.Executor(place)
    exe.run(static.default_startup_program())
    fleet.init_worker()

    train_dataloader = static.bind(
        fleet.shard(DataLoader(train_data, batch_size=64, shuffle=True, drop_last=True)), [x, y]
    )
    epoch = 3
    for _ in range(epoch):
        for data in train_dataloader():
            cost_val, acc_val = exe.run(
                static.default_main_program(), feed=data, fetch_list=[cost.name, acc.name]
            )
            print(f"loss: {cost_val}, acc: {acc_val}", flush=True)
    fleet.stop_worker()
