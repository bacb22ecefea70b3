# SPDX-License-Identifier: Apache-2.0
"""Trains on records of a shard queue; each worker logs the records it reads."""

import argparse
import pathlib
import time

import torch
from mortal import Counter, die_if_asked

import fleetlight as fleet

parser = argparse.ArgumentParser()
parser.add_argument("--die", nargs="*", default=[], help="workers, as worker:step:moment")
options = parser.parse_args()
EPOCHS, LENGTH, BATCH = 2, 240, 4
#: the batch of a slow worker and two loaded ahead are in two ranges of two batches
HELD = 4


def be_slow(epoch: int) -> None:
    """Worker 0 holds its first batch until worker 1 has died, or has read all other records."""
    done = pathlib.Path(f"read.1.{epoch}")
    requested = [moment.split(":") for moment in options.die]
    deaths = [
        pathlib.Path(f"died.{worker}.{step}.{moment}")
        for worker, step, moment in requested
        if worker == "1" and (int(step) - 1) // LENGTH == epoch
    ]
    while not all(death.exists() for death in deaths):
        time.sleep(0.01)
    while (
        not deaths
        and len(done.read_text().split() if done.exists() else "") < LENGTH - HELD * BATCH
    ):
        time.sleep(0.01)


strategy = fleet.DistributedStrategy(a_sync=True, durability="log")
fleet.init(strategy=strategy)
model = fleet.distributed_model(Counter())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
data = torch.utils.data.TensorDataset(torch.arange(LENGTH))
loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
loader = fleet.shard(loader, deal="queue", range_batches=2)
fleet.init_worker()
step = 0
for epoch in range(loader.epoch, EPOCHS):
    for (ids,) in loader:
        step = epoch * LENGTH + loader.consumed
        die_if_asked(options.die, step, "forward")
        loss = -model(ids)
        optimizer.zero_grad()
        loss.backward()
        die_if_asked(options.die, step, "step")
        optimizer.step()
        die_if_asked(options.die, step, "after")
        with pathlib.Path(f"read.{fleet.worker_index()}.{epoch}").open("a") as file:
            file.write(" ".join(map(str, ids.tolist())) + "\n")
        if fleet.is_first_worker() and loader.consumed == BATCH:
            be_slow(epoch)
    die_if_asked(options.die, epoch, "epoch")
fleet.barrier_worker()
with torch.no_grad():
    counts = model.rows(torch.arange(LENGTH))
print(f"COUNTED {counts.min():g} to {counts.max():g}", flush=True)
fleet.stop_worker()
