# SPDX-License-Identifier: Apache-2.0
"""Trains until a file `enough` exists, and logs each step; a stop saves it."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="where the processes write what they did")
options = parser.parse_args()

fleet.init()
model = torch.nn.Sequential(fleet.nn.SparseEmbeddingBag(4), torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
data = TensorDataset(torch.arange(64).reshape(-1, 1))
loader = fleet.shard(DataLoader(data, 4))
fleet.init_worker()
journal = options.folder / f"worker.{fleet.worker_index()}"
while True:
    for (ids,) in loader:
        optimizer.zero_grad()
        model(ids).sum().backward()
        optimizer.step()
        with journal.open("a") as file:
            file.write(f"{fleet.worker_num()} {loader.epoch} {ids.flatten().tolist()}\n")
    if fleet.all_reduce(torch.tensor([float((options.folder / "enough").exists())]), "min").item():
        break
fleet.barrier_worker()
with torch.no_grad():
    total = float(model[0](torch.arange(64).reshape(-1, 1)).abs().sum())
(options.folder / f"done.{fleet.worker_index()}").write_text(f"{total:.4f}\n")
fleet.stop_worker()
