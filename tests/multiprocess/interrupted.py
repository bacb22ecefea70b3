# SPDX-License-Identifier: Apache-2.0
"""Trains while it is stopped or loses a worker; logs all records it reads."""

import argparse
import hashlib
import os
import pathlib
import signal
import time

import torch
from torch.utils.data import DataLoader, Dataset

import fleetlight as fleet
from fleetlight.fleet.job import current

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["collective", "sync", "async", "geo"], default="collective")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--terminate", type=int, default=-1, help="fleetrun, after this step")
parser.add_argument("--await_stop", type=int, default=-1, help="after this step")
parser.add_argument("--kill", type=int, default=-1, help="the last worker, after this step")
parser.add_argument("--deltas", action="store_true", help="save what changed in a larger table")
options = parser.parse_args()

EPOCHS, RECORDS = 3, 96


class Records(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randint(0, 40, (4,), generator=torch.Generator().manual_seed(index))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        served = options.mode != "collective"
        self.rows = fleet.nn.SparseEmbedding(4) if served else torch.nn.Embedding(40, 4)
        if options.deltas:
            # all its rows are there from the first save on
            self.rows = torch.nn.Embedding(4000, 4, sparse=True)
        self.drop = torch.nn.Dropout(0.0 if served else 0.2)
        self.head = torch.nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.rows(ids)).flatten(1)).squeeze(-1)


def has_signal() -> bool:
    """True once the signal reached this worker through fleetrun."""
    stopping = current().autosave
    return stopping is not None and stopping.seen


def has_saved() -> bool:
    """True once there is a checkpoint, which is to be a delta where they are wanted."""
    manifest = pathlib.Path(os.environ["FLEET_CHECKPOINT"], "manifest.json")
    return manifest.exists() and (not options.deltas or '"base"' in manifest.read_text())


def is_stopping() -> bool:
    """True once the signal has reached any worker."""
    mark = pathlib.Path("stopping")
    if has_signal():
        mark.touch()
    return mark.exists()


strategy = fleet.DistributedStrategy(checkpoint_configs={"every_steps": 5})
if options.deltas:
    strategy.checkpoint_configs.base_every = 100
strategy.a_sync = options.mode in ("async", "geo")
if options.mode == "geo":
    strategy.a_sync_configs.k_steps = 4
fleet.init(is_collective=options.mode == "collective", strategy=strategy)
torch.manual_seed(0)
model = fleet.distributed_model(Net())
kind = torch.optim.SGD if options.mode == "geo" else torch.optim.Adagrad
optimizer = fleet.distributed_optimizer(kind(model.parameters(), lr=0.05))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
fleet.attach(scheduler=scheduler)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
if options.mode != "collective":
    fleet.init_worker()
loader = fleet.shard(DataLoader(Records(), batch_size=options.batch, shuffle=True))
me, restart = fleet.worker_index(), os.environ["FLEET_RESTART"]
seen = pathlib.Path(f"seen.{me}.{restart}")
is_last = me == fleet.worker_num() - 1
step = 0
with seen.open("a") as file:
    for epoch in range(loader.epoch, EPOCHS):
        for ids, x in loader:
            optimizer.zero_grad()
            (model(x) - x.sum(1) % 7).square().mean().backward()
            optimizer.step()
            scheduler.step()
            step += 1
            for record in ids[: loader.counted].tolist():
                print(epoch, record, file=file, flush=True)
            if step == options.terminate and me == 0:
                os.kill(os.getppid(), signal.SIGTERM)
            while 0 < options.terminate == step - 2 and not has_signal():
                time.sleep(0.01)
            if step == options.await_stop and restart == "0":
                print("waiting to be stopped", flush=True)
                while not is_stopping():
                    time.sleep(0.01)
            if step == options.kill and is_last and restart == "0":
                # wait for the save in the background
                while not has_saved():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
fleet.barrier_worker()
with torch.no_grad():
    values = torch.cat([model.rows(torch.arange(40)).flatten(), model.head.weight.flatten()])
digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
print(f"LEARNT {digest} {float(values.abs().sum()):.4f} {scheduler.last_epoch}", flush=True)
fleet.stop_worker()
