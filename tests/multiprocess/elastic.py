# SPDX-License-Identifier: Apache-2.0
"""Trains epoch after epoch while workers join and leave; each worker logs the records it reads."""

import argparse
import pathlib

import torch

import fleetlight as fleet

MODES = {
    "async": {"a_sync": True},
    "staleness": {"a_sync": True, "a_sync_configs": {"staleness": 3}},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 4}},
    "sync": {"a_sync": False},
}
LENGTH, BATCH = 600, 4

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=MODES, default="async")
parser.add_argument("--wide", action="store_true", help="a newcomer with another model")
parser.add_argument("--records", type=int, default=LENGTH, help="of the data set")
parser.add_argument("--batches", type=int, default=LENGTH, help="leave the loop after so many")
options = parser.parse_args()


class Counter(torch.nn.Module):
    """A row is the number of times that its id was pushed, in async mode."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(2 if options.wide else 1, initializer="zeros")
        self.scale = torch.nn.Parameter(torch.ones(1))
        #: equal on all workers that start with the job; not what a newcomer would make
        self.register_buffer("mark", torch.rand(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum() + 0 * self.scale.sum()


fleet.init(strategy=fleet.DistributedStrategy(**MODES[options.mode]))
torch.manual_seed(fleet.worker_index() if fleet.is_worker() else 0)
model = fleet.distributed_model(Counter())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=1.0)
fleet.attach(scheduler=scheduler)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
data = torch.utils.data.TensorDataset(torch.arange(options.records))
loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
loader = fleet.shard(loader, deal="queue", range_batches=2)
fleet.init_worker()
me, epoch, finishes = fleet.worker_index(), loader.epoch, False
while not finishes:
    with pathlib.Path(f"read.{me}.{epoch}").open("a") as file:
        for batch, (ids,) in enumerate(loader, 1):
            loss = -model(ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(*ids.tolist(), file=file, flush=True)
            pathlib.Path(f"trained.{me}").touch()
            if batch == options.batches:
                break
    scheduler.step()
    epoch += 1
    wishes = torch.tensor(float(me == 0 and pathlib.Path("finish").exists()))
    finishes = bool(fleet.all_reduce(wishes, "max"))
with torch.no_grad():
    counts = model.rows(torch.arange(LENGTH))
print(
    f"WORKER {me}: epochs {epoch}, counts {counts.min():g} to {counts.max():g}, "
    f"scheduler {scheduler.last_epoch}, mark {model.mark.sum():.6f}, workers {fleet.worker_num()}",
    flush=True,
)
fleet.stop_worker()
