# SPDX-License-Identifier: Apache-2.0
"""Counts records over several starts of a job that stops while processes die."""

import argparse
import os
import pathlib
import shutil
import signal
import socket
import time
from typing import Any

import torch
from mortal import Counter, die_if_asked
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.fleet.job import current
from fleetlight.fleet.served.tables.table_files import TableFiles

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["sync", "async", "staleness", "geo"], default="async")
parser.add_argument("--deal", choices=["blocks", "queue"], default="blocks")
parser.add_argument("--durability", default="log")
parser.add_argument("--die", nargs="*", default=[], help="workers, as worker:step:moment")
parser.add_argument("--stop", type=int, default=0, help="fleetrun, after this step of all workers")
parser.add_argument("--stop_within", type=int, default=0, help="before this step of worker 0")
parser.add_argument("--early", type=int, help="worker that waits after its loop")
parser.add_argument("--kill_a_server", action="store_true", help="while the stop is saved")
parser.add_argument("--put_back", action="store_true", help="an older copy of server 0's folder")
parser.add_argument("--take_port", type=int, default=0, help="of server 0, before this step")
options = parser.parse_args()
EPOCHS, LENGTH, BATCH = 2, 96, 4


def knows_of_the_stop() -> bool:
    """True once this worker knows of the stop from the signal or the servers."""
    stopping, session = current().autosave, current().session
    assert stopping is not None
    assert session is not None
    return stopping.seen or session.client.signals.received.stop


def kill_server_0() -> None:
    """Kill it as a system without free memory does."""
    os.kill(int(pathlib.Path("pid.0").read_text()), signal.SIGKILL)


def take_the_port() -> socket.socket:
    """Kill server 0 and listen at its port, so that it cannot restart."""
    host, port = os.environ["FLEET_SERVER_ENDPOINTS"].split(",")[0].split(":")
    kill_server_0()
    while True:
        stranger = socket.socket()
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            stranger.bind((host, int(port)))
            stranger.listen()
            return stranger
        except OSError:
            # the server is not dead yet
            stranger.close()
            time.sleep(0.001)


def kill_and_save(files: TableFiles, *arguments: Any) -> Any:
    """Kill server 0 within a save, once: the tables have a snapshot but no file."""
    TableFiles.save = save  # type: ignore[method-assign]
    kill_server_0()
    return save(files, *arguments)


def put_back_older_folder(step: int) -> None:
    """After step 8, once: put back the folder that server 0 had after step 4."""
    [folder], copy = pathlib.Path().glob("durability/server-0-*"), pathlib.Path("copy")
    session = current().session
    assert session is not None
    if step == 4 and not copy.exists():
        session.communicator.flush()
        shutil.copytree(folder, copy)
    elif step == 8 and not pathlib.Path("put_back").exists():
        pathlib.Path("put_back").touch()
        session.communicator.flush()
        kill_server_0()
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)


save = TableFiles.save


def ask_to_stop() -> None:
    """Stop the job once all workers have reached this step."""
    pathlib.Path(f"here.{fleet.worker_index()}").touch()
    while not all(pathlib.Path(f"here.{index}").exists() for index in range(fleet.worker_num())):
        time.sleep(0.01)
    if fleet.is_first_worker():
        if options.kill_a_server:
            TableFiles.save = kill_and_save  # type: ignore[method-assign]
        os.kill(os.getppid(), signal.SIGTERM)
    while not knows_of_the_stop():
        time.sleep(0.01)


def stop_while_worker_1_restarts() -> None:
    """Stop the job while worker 1 restarts; once."""
    died, asked = pathlib.Path(f"died.1.{options.stop_within}.forward"), pathlib.Path("asked")
    while not died.exists():
        time.sleep(0.01)
    if not asked.exists():
        asked.touch()
        os.kill(os.getppid(), signal.SIGTERM)


def stop_while_another_waits() -> None:
    """Stop the job when the other worker has ended its loop and waits for this one."""
    while not pathlib.Path("after").exists():
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
    while not knows_of_the_stop():
        time.sleep(0.01)


CONFIGS = {"geo": {"k_steps": 2}, "staleness": {"staleness": 1}}
strategy = fleet.DistributedStrategy(
    a_sync=options.mode != "sync",
    a_sync_configs=CONFIGS.get(options.mode, {}),
    durability=options.durability,
    checkpoint_configs={"every_steps": 3},
)
fleet.init(strategy=strategy)
model = fleet.distributed_model(Counter())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
if fleet.is_server():
    pathlib.Path(f"pid.{fleet.server_index()}").write_text(str(os.getpid()))
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
data = TensorDataset(torch.arange(LENGTH))
loader = fleet.shard(DataLoader(data, BATCH, shuffle=True), deal=options.deal, range_batches=2)
fleet.init_worker()
taken = pathlib.Path("taken")
for _ in range(loader.epoch, EPOCHS):
    for (ids,) in loader:
        step = current().step + 1
        if step == options.stop_within and fleet.is_first_worker():
            stop_while_worker_1_restarts()
        if options.early not in (None, fleet.worker_index()) and step == 4:
            stop_while_another_waits()
        die_if_asked(options.die, step, "forward")
        if step == options.take_port and fleet.is_first_worker() and not taken.exists():
            taken.touch()
            stranger = take_the_port()
        optimizer.zero_grad()
        assert loader.share is not None
        # sync: gradients are those of a mean over the samples of all workers
        samples = loader.share.total / len(ids) if options.mode == "sync" else 1
        (-samples * model(ids)).backward()
        die_if_asked(options.die, step, "step")
        optimizer.step()
        die_if_asked(options.die, step, "after")
        if options.put_back:
            put_back_older_folder(step)
        if step == options.stop:
            ask_to_stop()
pathlib.Path("after").touch()
fleet.barrier_worker()
with torch.no_grad():
    counts = model.rows(torch.arange(LENGTH))
print(f"COUNTED {counts.min():g} to {counts.max():g}", flush=True)
fleet.stop_worker()
