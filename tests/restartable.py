# SPDX-License-Identifier: Apache-2.0
"""A served job whose only worker may die and restart, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.served import ASYNC, SYNC, Built, Job, Member, Net, geo, loss_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.data import ShardLoader
from fleetlight.fleet.job import set_current
from fleetlight.fleet.served.durable.replayed_job import replay_of, served_job
from fleetlight.fleet.served.job import ServedJob
from fleetlight.ps import messages as m
from fleetlight.ps.transport.interface import MemoryChannel
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, PUSH
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal

RECORDS, BATCH = 24, 4
MODES = {"sync": SYNC, "async": ASYNC, "geo": geo(1)}
in_modes = pytest.mark.parametrize("mode", MODES)


class Died(Exception):
    """Stands for the death of the worker's process."""


class Own(Net):
    """A model with values that no server keeps."""

    def __init__(self) -> None:
        super().__init__(ids=1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.whole = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))


def build() -> Built:
    model = Own()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, [torch.optim.SGD(trained, lr=0.1)]


class RestartableJob(Job):
    """A job whose only worker may die and restart; the servers stay."""

    def __init__(self, folder: Path, mode: str = "sync", build: Any = build) -> None:
        super().__init__(build, MODES[mode], workers=1, servers=2)
        self.folder = folder
        self.returns: list[bool] = []

    def client(self, index: int) -> Client:
        identity = WorkerIdentity(index, 1, 2, job="j", start=0, started_at=1)
        journal = WorkerJournal(self.folder, identity)

        def connect(lane: str) -> Sequence[MemoryChannel]:
            channels = [MemoryChannel(s, f"server {s.index}") for s in self.servers]
            known = lane if lane in (CONTROL, PUSH) else "pull"
            for server, channel in enumerate(channels):
                hello = m.Greeting(
                    "test", 0, 1, server, 2, 1, known, incarnation=journal.identity.incarnation
                )
                channel.call(hello)
            return channels

        return Client(index, 1, 2, connect, journal)

    def job_of(self, **parts: Any) -> ServedJob:
        return served_job(replay_of(parts["session"].client.journal, self.returns.append), **parts)

    def run_incarnation(self, script: Callable[[Member], Any]) -> Any:
        """Run one incarnation; returns the script's result or its death."""
        member = self.member(0)
        journal = member.session.client.journal
        set_current(member.context)
        try:
            found = script(member)
            member.session.stop()
        except Died as died:
            if member.session.is_open:
                member.communicator.flush()
            return died
        finally:
            set_current(None)
            member.context.group._over.set()  # type: ignore[union-attr]
            journal.close(is_needed=True)
        return found


def sharded(records: int = RECORDS, **more: Any) -> ShardLoader:
    data = TensorDataset(torch.arange(records).reshape(records, 1))
    return fleet.shard(DataLoader(data, BATCH, shuffle=True), **more)


def train(member: Member, ids: Tensor) -> None:
    member.optimizer.zero_grad()
    loss_of(member.model, ids, torch.zeros(len(ids), 1)).backward()
    member.optimizer.step()


def outcome(member: Member) -> Any:
    """All trained values, and those that only this worker has."""
    rows = torch.from_numpy(member.rows(range(RECORDS)))
    own = [*member.model.parameters(), *member.model.buffers()]
    return [rows.tolist(), *(one.tolist() for one in own if one.numel())]


class Script:
    """Trains; its first incarnation dies in step `dies`."""

    def __init__(self, member: Member, incarnation: int, dies: int, seen: list[Any]) -> None:
        member.session.open(member.context)
        self.member, self.incarnation, self._dies, self._seen = member, incarnation, dies, seen

    def step(self, ids: Tensor, *others: Tensor) -> None:
        """Train on a batch; record it together with the batches of other loaders."""
        train(self.member, ids)
        self.member.communicator.flush()
        if self.member.context.step == self._dies and self.incarnation == 1:
            raise Died
        self._seen.append([batch.flatten().tolist() for batch in (ids, *others)])

    def result(self) -> list[Any]:
        """The batches, and the trained values."""
        return [*self._seen, outcome(self.member)]


def run_with_restart(
    job: RestartableJob, script: Callable[[Script], Any], dies: int = -1
) -> list[Any]:
    """The batches of all incarnations of a script, and the trained values."""
    seen: list[Any] = []
    found = None
    for incarnation in (1, 2) if dies >= 0 else (1,):

        def run_script(member: Member, incarnation: int = incarnation) -> Any:
            running = Script(member, incarnation, dies, seen)
            script(running)
            return running.result()

        found = job.run_incarnation(run_script)
    assert isinstance(found, list)
    return found
