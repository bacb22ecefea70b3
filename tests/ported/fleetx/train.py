# SPDX-License-Identifier: Apache-2.0
"""FleetX' cluster quick start: Wide&Deep with parameter servers, in three modes."""

import sys
from pathlib import Path

import numpy as np
import torch

import fleetlight as fleet
from fleetlight import static

sys.path.insert(0, str(Path(__file__).parents[1]))
from wide_deep_model import WideDeepModel

mode = sys.argv[1]


def distributed_training(exe: static.Executor, train_model: WideDeepModel, epoch_num: int) -> None:
    reader = train_model.loader
    for epoch_id in range(epoch_num):
        reader.start()
        try:
            while True:
                loss_val = exe.run(
                    program=static.default_main_program(), fetch_list=[train_model.cost.name]
                )
                print(f"TRAIN ---> pass: {epoch_id} loss: {np.mean(loss_val)}\n", flush=True)
        except static.EndOfData:
            reader.reset()


fleet.init(is_collective=False)
model = WideDeepModel()
model.net(is_train=True)

dist_strategy = fleet.DistributedStrategy()
dist_strategy.a_sync = mode != "sync"
if mode == "geo":
    dist_strategy.a_sync_configs = {"k_steps": 100}
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = fleet.distributed_optimizer(optimizer, dist_strategy)
optimizer.minimize(model.cost)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    exe = static.Executor("cpu")
    exe.run(static.default_startup_program())
    fleet.init_worker()
    distributed_training(exe, model, 4)
    targets = [model.inference_target_var]
    fleet.barrier_worker()
    fleet.save_inference_model("served", ["ids"], targets, program=fleet.main_program)
    fleet.stop_worker()
