# SPDX-License-Identifier: Apache-2.0
"""Training with few exchanges: Wide&Deep with GeoSGD, as in its document."""

import sys
from pathlib import Path

import torch

import fleetlight as fleet
from fleetlight import static

sys.path.insert(0, str(Path(__file__).parents[1]))
from wide_deep_model import WideDeepModel

model = WideDeepModel()
model.net(is_train=True)

fleet.init(role_maker=None)

dist_strategy = fleet.DistributedStrategy()
dist_strategy.a_sync = True
dist_strategy.a_sync_configs = {"k_steps": int(sys.argv[1])}

kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[sys.argv[2]]
optimizer = kind(model.parameters(), lr=0.5 if sys.argv[2] == "sgd" else 0.05)
optimizer = fleet.distributed_optimizer(optimizer, dist_strategy)
optimizer.minimize(model.cost)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    exe = static.Executor("cpu")
    exe.run(static.default_startup_program())
    fleet.init_worker()
    for epoch in range(3):
        for batch in model.loader():
            cost = exe.run(feed=batch, fetch_list=[model.cost])[0]
            print(f"epoch {epoch} cost={cost:.6f}", flush=True)
    fleet.barrier_worker()
    weights = sum(p.double().abs().sum().item() for p in model.tower.parameters())
    print(f"weights {weights:.6f}", flush=True)
    fleet.stop_worker()
