# SPDX-License-Identifier: Apache-2.0
"""Trains with servers that are killed on the way; prints what was learnt, bit for bit."""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import signal

import torch

import fleetlight as fleet

parser = argparse.ArgumentParser()
parser.add_argument("--kill", type=int, nargs="*", default=[], help="a server before these steps")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids)).squeeze(-1)


def kill_a_server(step: int) -> None:
    """As the system does it that has run out of memory."""
    number = step % fleet.server_num()
    os.kill(int(pathlib.Path(f"pid.{number}").read_text()), signal.SIGKILL)


strategy = fleet.DistributedStrategy(durability="log", durability_configs={"snapshot_s": 0.5})
fleet.init(strategy=strategy)
torch.manual_seed(0)
model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
if fleet.is_server():
    pathlib.Path(f"pid.{fleet.server_index()}").write_text(str(os.getpid()))
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
fleet.init_worker()
fleet.barrier_worker()
for step in range(options.steps):
    if step in options.kill and fleet.is_first_worker():
        kill_a_server(step)
    drawn = torch.Generator().manual_seed(100 * step + fleet.worker_index())
    ids = torch.randint(-50, 50, (16,), generator=drawn)
    loss = (model(ids) - (ids % 7)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    fleet.clip_grad_norm_(model, 0.5)
    optimizer.step()
fleet.barrier_worker()
with torch.no_grad():
    rows = model.rows(torch.arange(-50, 50))
digest = hashlib.sha256(rows.numpy().tobytes() + model.head.weight.detach().numpy().tobytes())
print(f"LEARNT {digest.hexdigest()[:16]} {float(rows.abs().sum()):.6f}", flush=True)
fleet.stop_worker()
