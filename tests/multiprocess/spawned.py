# SPDX-License-Identifier: Apache-2.0
"""Counts records of spawned loading processes, which run this script again."""

import sys

import torch
from mortal import Counter, die_if_asked
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.fleet.job import current

GUARDED = "--unguarded" not in sys.argv
STARTED_BY = "forkserver" if "--forkserver" in sys.argv else "spawn"
LENGTH, EPOCHS = 48, 2


def init() -> None:
    """Called at the top of the script, or under its guard."""
    fleet.init(strategy=fleet.DistributedStrategy(a_sync=True, durability="log"))


def main() -> None:
    model = fleet.distributed_model(Counter())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    data = TensorDataset(torch.arange(LENGTH))
    loader = fleet.shard(
        DataLoader(data, 4, shuffle=True, num_workers=1, multiprocessing_context=STARTED_BY)
    )
    for _ in range(loader.epoch, EPOCHS):
        for (ids,) in loader:
            die_if_asked(["1:4:forward"], current().step + 1, "forward")
            optimizer.zero_grad()
            (-model(ids)).backward()
            optimizer.step()
    fleet.barrier_worker()
    with torch.no_grad():
        counts = model.rows(torch.arange(LENGTH))
    print(f"COUNTED {counts.min():g} to {counts.max():g}", flush=True)
    fleet.stop_worker()


if not GUARDED:
    init()
if __name__ == "__main__":
    if GUARDED:
        init()
    main()
