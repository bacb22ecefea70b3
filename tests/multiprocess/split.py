# SPDX-License-Identifier: Apache-2.0
"""Trains on the shards of a stream; workers die on request, and resume alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from mortal import Counter, die_if_asked
from torch.utils.data import DataLoader, IterableDataset

import fleetlight as fleet

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["sync", "async"], default="sync")
parser.add_argument("--die", nargs="*", default=[], help="workers, as worker:step:moment")
options = parser.parse_args()
#: worker 0 has 42 records, worker 1 has 54
SIZES, BATCH, EPOCHS = (37, 23, 5, 31), 2, 2
RECORDS = sum(SIZES)


class Shards(IterableDataset[int]):
    """Numbers in shards, with a position."""

    def __init__(self, shards: Sequence[range]) -> None:
        self.shards, self.at = list(shards), 0

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        for number in [number for shard in self.shards for number in shard][self.at :]:
            self.at += 1
            yield number


starts = [sum(SIZES[:n]) for n in range(len(SIZES))]
data = Shards([range(start, start + size) for start, size in zip(starts, SIZES, strict=True)])
fleet.init(strategy=fleet.DistributedStrategy(a_sync=options.mode == "async", durability="log"))
model = fleet.distributed_model(Counter())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
loader = fleet.shard(DataLoader(data, BATCH), deal="shards")
fleet.init_worker()
for epoch in range(loader.epoch, EPOCHS):
    for ids in loader:
        step = epoch * 1000 + loader.consumed
        die_if_asked(options.die, step, "forward")
        loss = -model(ids)
        optimizer.zero_grad()
        loss.backward()
        die_if_asked(options.die, step, "step")
        optimizer.step()
        die_if_asked(options.die, step, "after")
fleet.barrier_worker()
with torch.no_grad():
    counts = model.rows(torch.arange(RECORDS))[:, 0]
print(f"COUNTED {counts.tolist()}", flush=True)
fleet.stop_worker()
