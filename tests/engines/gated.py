# SPDX-License-Identifier: Apache-2.0
"""Trains with servers; worker 0 waits at a step until the test has changed something."""

import argparse
import hashlib
import time
from pathlib import Path

import torch

import fleetlight as fleet

parser = argparse.ArgumentParser()
parser.add_argument("--gate", type=int, default=-1, help="the step at which worker 0 waits")
parser.add_argument("--durability", default="none")
parser.add_argument("--readers", type=int, default=0, help="processes that load batches")
options = parser.parse_args()
RECORDS, BATCH, EPOCHS, SPAN = 96, 4, 2, 40


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids)).squeeze(-1)


def pass_gate(step: int) -> None:
    """Report that the step is reached, and wait for the test."""
    if step != options.gate or not fleet.is_first_worker():
        return
    Path("reached").touch()
    while not Path("go").exists():
        time.sleep(0.01)


fleet.init(strategy=fleet.DistributedStrategy(durability=options.durability))
torch.manual_seed(0)
model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
data = torch.utils.data.TensorDataset(torch.arange(RECORDS) * 7 % SPAN)
loader = fleet.shard(
    torch.utils.data.DataLoader(data, BATCH, shuffle=True, num_workers=options.readers)
)
fleet.init_worker()
per_epoch = RECORDS // (BATCH * fleet.worker_num())
for epoch in range(loader.epoch, EPOCHS):
    for (ids,) in loader:
        step = epoch * per_epoch + loader.consumed // (BATCH * fleet.worker_num()) - 1
        pass_gate(step)
        optimizer.zero_grad()
        (model(ids) - (ids % 7)).square().mean().backward()
        optimizer.step()
        print(f"STEP {step} {' '.join(map(str, ids.tolist()))}", flush=True)
fleet.barrier_worker()
with torch.no_grad():
    rows = model.rows(torch.arange(SPAN)).numpy().tobytes()
    head = model.head.weight.detach().numpy().tobytes()
print(f"LEARNT {hashlib.sha256(rows + head).hexdigest()[:16]}", flush=True)
fleet.stop_worker()
