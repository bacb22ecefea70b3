# SPDX-License-Identifier: Apache-2.0
"""Trains, is killed, and resumes with the state of its servers; prints the values."""

import hashlib
import os
import pathlib
import signal
import sys
import time

import torch

import fleetlight as fleet

ROWS, STEPS = 20, 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(ROWS, 4, sparse=True)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids)).squeeze(-1)


def print_values(moment: str) -> None:
    """Print a digest of the dense values and rows of the servers."""
    with torch.no_grad():
        found = [*model.head.parameters(), model.rows(torch.arange(ROWS))]
    digest = hashlib.sha256(
        b"".join(value.detach().numpy().tobytes() for value in found)
    ).hexdigest()
    print(f"{moment} {digest[:16]}", flush=True)


def wait_to_go() -> None:
    """Wait while the test starts a second job on the folders of the servers."""
    pathlib.Path("waiting").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)


# no seed: each start has its own first values
fleet.init(strategy=fleet.DistributedStrategy(durability="log"))
model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
fleet.init_worker()
print_values("BEGAN")
for step in range(STEPS):
    if "--wait" in sys.argv and step == STEPS // 2:
        wait_to_go()
    optimizer.zero_grad()
    (model(torch.arange(ROWS)) - 1).square().mean().backward()
    optimizer.step()
fleet.barrier_worker()
print_values("LEARNT")
# no worker leaves before the others have reported
fleet.barrier_worker()
if "--die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
fleet.stop_worker()
