# SPDX-License-Identifier: Apache-2.0
"""Trains while servers are killed; prints digests of the trained values."""

import argparse
import hashlib
import os
import pathlib
import signal
from typing import Any

import torch
from mortal import die_if_asked

import fleetlight as fleet
from fleetlight.fleet.job import current
from fleetlight.ps.messages import Apply
from fleetlight.ps.server.checkpoints.checkpoint_handler import CheckpointHandler
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import HEARTBEAT
from fleetlight.wire.control_signals import ControlSignal

parser = argparse.ArgumentParser()
parser.add_argument("--kill", type=int, nargs="*", default=[], help="a server before these steps")
parser.add_argument("--die", nargs="*", default=[], help="workers, as worker:step:moment")
parser.add_argument("--save", type=int, nargs="*", default=[], help="requested before these steps")
parser.add_argument("--batches", type=int, default=5, help="of each epoch")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--go_on", action="store_true", help="without a worker that is lost")
parser.add_argument("--die_saving", action="store_true", help="a server, during the script's save")
options = parser.parse_args()
BATCH = 8
REPLY_S = 20.0


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(self.rows(ids)))).squeeze(-1)


def kill_a_server(step: int) -> None:
    """Kill it as a system without free memory does."""
    number = step % fleet.server_num()
    os.kill(int(pathlib.Path(f"pid.{number}").read_text()), signal.SIGKILL)


def request_save(number: int) -> None:
    """Request a save as the clock of worker 0 does; both servers reply before the step."""
    client = current_client()
    client.heartbeat(0)
    with client._lane_lock(HEARTBEAT):
        # a heartbeat goes only to servers that replied to the previous one
        client._heartbeats.collect(REPLY_S)
        client.signals.own = ControlSignal(saves=number)
        client._heartbeats.send(0)
        assert len(client._heartbeats.collect(REPLY_S)) == fleet.server_num()


def die_during_a_save() -> None:
    """Kill this server during its first save."""
    save = CheckpointHandler.save

    def saved(handler: CheckpointHandler, message: Any) -> Any:
        mark = pathlib.Path("died.saving")
        if not mark.exists():
            mark.touch()
            pathlib.Path(message.folder, "half-a-table").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return save(handler, message)

    CheckpointHandler.save = saved  # type: ignore[method-assign]


def current_client() -> Client:
    session = current().session
    assert session is not None
    return session.client


def die_before_replies() -> None:
    """Die before this worker reads the replies to its step."""
    client, ask = current_client(), current_client().ask

    def asked(lane: str, requests: Any, *more: Any) -> Any:
        answers = ask(lane, requests, *more)
        if lane == "push":
            die_if_asked(options.die, step, "made" if isinstance(requests[0][0], Apply) else "held")
        return answers

    client.ask = asked  # type: ignore[method-assign]


strategy = fleet.DistributedStrategy(
    durability="log",
    durability_configs={"snapshot_s": 0.5},
    lost_worker="go_on" if options.go_on else "fail",
)
fleet.init(strategy=strategy)
torch.manual_seed(fleet.worker_index() if fleet.is_worker() else 0)
model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
fleet.attach(scheduler=scheduler)
if fleet.is_server():
    if options.die_saving and fleet.server_index() == 1:
        die_during_a_save()
    pathlib.Path(f"pid.{fleet.server_index()}").write_text(str(os.getpid()))
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
count = options.batches * BATCH * fleet.worker_num()
drawn = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randint(-50, 50, (count,), generator=drawn))
loader = fleet.shard(torch.utils.data.DataLoader(data, BATCH, shuffle=True))
fleet.init_worker()
fleet.barrier_worker()
die_before_replies()
for epoch in range(loader.epoch, options.epochs):
    for (ids,) in loader:
        step = epoch * options.batches + loader.consumed // (BATCH * fleet.worker_num()) - 1
        if step in options.kill and fleet.is_first_worker():
            kill_a_server(step)
        die_if_asked(options.die, step, "forward")
        loss = (model(ids) - (ids % 7)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        die_if_asked(options.die, step, "clip")
        fleet.clip_grad_norm_(model, 0.5)
        die_if_asked(options.die, step, "step")
        if step in options.save and fleet.is_first_worker():
            request_save(options.save.index(step) + 1)
        optimizer.step()
        die_if_asked(options.die, step, "after")
        scheduler.step()
        if step % 3 == 0:
            total = fleet.all_reduce(loss.detach().clone())
            die_if_asked(options.die, step, "told")
            print(f"loss after step {step}: {total:.6f}", flush=True)
    fleet.barrier_worker()
    die_if_asked(options.die, epoch, "epoch")
    if options.die_saving:
        fleet.save_persistables("ckpt")
fleet.barrier_worker()
with torch.no_grad():
    rows = model.rows(torch.arange(-50, 50))
buffers = b"".join(buffer.numpy().tobytes() for buffer in model.buffers())
shared = rows.numpy().tobytes() + model.head.weight.detach().numpy().tobytes()
values, own = hashlib.sha256(shared).hexdigest()[:16], hashlib.sha256(buffers).hexdigest()[:16]
print(f"LEARNT {values} {float(rows.abs().sum()):.6f} OWN {own}", flush=True)
fleet.stop_worker()
