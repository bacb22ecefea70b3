# SPDX-License-Identifier: Apache-2.0
"""Publishes while a server and then worker 0 are killed; prints what was published."""

import os
import pathlib
import signal

import torch
from mortal import Counter, die_if_asked

import fleetlight as fleet
from fleetlight.serve import Reader

IDS, STEPS = 40, 9
#: the steps before which it publishes, those before which a process is killed
PUBLISHED, SERVER_DIES, WORKER_DIES = (2, 3, 5, 6, 8), 4, "0:7:forward"

fleet.init(
    strategy=fleet.DistributedStrategy(
        a_sync=False, durability="log", durability_configs={"folder": "kept"}
    )
)
model = Counter()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(optimizer)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.arange(2 * STEPS * 4) * 7 % IDS), batch_size=4
)
if fleet.is_server():
    pathlib.Path(f"pid.{fleet.server_index()}").write_text(str(os.getpid()))
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    publisher = fleet.publish("target", every_s=1e6)
    loader = fleet.shard(loader)
    for (ids,) in loader:
        step = loader.consumed // (4 * fleet.worker_num()) - 1
        mark = pathlib.Path(f"published.{step}")
        if publisher is not None and step in PUBLISHED and not mark.exists():
            mark.touch()
            made = publisher.publish_now()
            with Reader("target", cache="cache", follow=False) as reader:
                got = torch.from_numpy(reader.lookup("rows", torch.arange(IDS).numpy()))
            with torch.no_grad():
                same = torch.equal(got, fleet.rows(model.rows, torch.arange(IDS)))
            kind = "delta" if made.previous else "base"
            print(
                f"PUBLISHED {step} {made.number} {kind} {made.step} {reader.epoch} {same}",
                flush=True,
            )
        if step == SERVER_DIES and publisher is not None:
            os.kill(int(pathlib.Path("pid.1").read_text()), signal.SIGKILL)
        die_if_asked([WORKER_DIES], step, "forward")
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.stop_worker()
