# SPDX-License-Identifier: Apache-2.0
"""A worker that dies and is started again: its script goes on behind the step that it died in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.served import ASYNC, SYNC, Built, Job, Member, Net, geo, loss_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import fleetlight as fleet
from fleetlight.data import ShardLoader
from fleetlight.errors import ConfigError
from fleetlight.fleet.checkpoints import loading
from fleetlight.fleet.job import set_current
from fleetlight.fleet.served.durable import replay
from fleetlight.fleet.served.durable.replayed_job import replay_of, served_job
from fleetlight.fleet.served.job import ServedJob
from fleetlight.ps import messages as m
from fleetlight.ps.transport.interface import MemoryChannel
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, PUSH
from fleetlight.ps.worker.replay import worker_journal as journal_module
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal

RECORDS, BATCH = 24, 4
MODES = {"sync": SYNC, "async": ASYNC, "geo": geo(1)}
in_modes = pytest.mark.parametrize("mode", MODES)


class Died(Exception):
    """Of the worker's process, as its script is concerned."""


class Own(Net):
    """With values that no server keeps."""

    def __init__(self) -> None:
        super().__init__(ids=1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.whole = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))


def build() -> Built:
    model = Own()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, [torch.optim.SGD(trained, lr=0.1)]


class Lives(Job):
    """A job whose only worker may die; the servers stay."""

    def __init__(self, folder: Path, mode: str = "sync", build: Any = build) -> None:
        super().__init__(build, MODES[mode], workers=1, servers=2)
        self.folder = folder
        self.returns: list[bool] = []

    def client(self, index: int) -> Client:
        whose = WorkerIdentity(index, 1, 2, job="j", start=0, started_at=1)
        journal = WorkerJournal(self.folder, whose)

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

    def life(self, script: Callable[[Member], Any]) -> Any:
        """What the script answers, or that it has died."""
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
    """All that was learnt, and what only this worker has."""
    rows = torch.from_numpy(member.rows(range(RECORDS)))
    own = [*member.model.parameters(), *member.model.buffers()]
    return [rows.tolist(), *(one.tolist() for one in own if one.numel())]


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Callable[..., Lives]]:
    """Jobs, each with a folder of its own."""
    made: list[Lives] = []

    def make(*arguments: Any, **more: Any) -> Lives:
        made.append(Lives(tmp_path / str(len(made)), *arguments, **more))
        return made[-1]

    yield make
    for one in made:
        for server in one.servers:
            server.close()


# -- what only the worker has ---------------------------------------------------------------------


@in_modes
@pytest.mark.parametrize("large", [0, 1 << 16])
@pytest.mark.parametrize("dies", [1, 4, 9])
def test_what_the_script_does_to_frozen_parameters_is_not_lost(
    at: Callable[..., Lives], mode: str, dies: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_LARGE", large)
    lives: list[int] = []

    def script(member: Member, dies: int) -> Any:
        model: Any = member.model
        member.session.open(member.context)
        loader = sharded()
        lives.append(0)
        for _ in range(loader.epoch, 2):
            for (ids,) in loader:
                train(member, ids * (1 + int(model.whole)))
                member.communicator.flush()
                if len(lives) == 1 and model.whole == dies:
                    raise Died
                # as a teacher follows its student, or what is averaged: not a gradient in it
                model.frozen.data.mul_(0.9)
                model.frozen.data = model.frozen.data + model.linear.weight.data[0, :3]
                model.whole.add_(1)
                model.seen.copy_(ids[:2, 0])
        return outcome(member)

    unharmed = at(mode).life(lambda member: script(member, -1))
    lives.clear()
    job = at(mode)
    assert isinstance(job.life(lambda member: script(member, dies)), Died)
    assert job.life(lambda member: script(member, dies)) == unharmed


# -- where it goes on -----------------------------------------------------------------------------


@pytest.mark.parametrize("compacts", [False, True])
def test_what_is_agreed_on_at_the_first_forward_is_not_agreed_on_again(
    at: Callable[..., Lives], compacts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first values are those of the first life: all that was learnt would be lost."""
    if compacts:
        monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 0)

    def script(member: Member, dies: int) -> Any:
        loader = sharded()
        for _ in range(loader.epoch, 2):
            for step, (ids,) in enumerate(loader):
                train(member, ids)
                if step == dies:
                    raise Died
        return outcome(member)

    unharmed = at().life(lambda member: script(member, -1))
    job = at()
    assert isinstance(job.life(lambda member: script(member, 3)), Died)
    assert job.life(lambda member: script(member, -1)) == unharmed


class Script:
    """Trains, and dies behind the step of that number of its first life."""

    def __init__(self, member: Member, life: int, dies: int, seen: list[Any]) -> None:
        member.session.open(member.context)
        self.member, self.life, self._dies, self._seen = member, life, dies, seen

    def step(self, ids: Tensor, *others: Tensor) -> None:
        """On a batch, and what lies beside it."""
        train(self.member, ids)
        self.member.communicator.flush()
        if self.member.context.step == self._dies and self.life == 1:
            raise Died
        self._seen.append([batch.flatten().tolist() for batch in (ids, *others)])

    def goes_on(self) -> list[Any]:
        """What it has trained on, and learnt."""
        return [*self._seen, outcome(self.member)]


def played(job: Lives, script: Callable[[Script], Any], dies: int = -1) -> list[Any]:
    """What all lives of a script have trained on, and what was learnt."""
    seen: list[Any] = []
    found = None
    for life in (1, 2) if dies >= 0 else (1,):

        def lived(member: Member, life: int = life) -> Any:
            playing = Script(member, life, dies, seen)
            script(playing)
            return playing.goes_on()

        found = job.life(lived)
    assert isinstance(found, list)
    return found


def side_by_side(script: Script) -> None:
    """The second loader is shorter, so its epochs are others."""
    first, second = sharded(), sharded(20)
    for _ in range(first.epoch, 3):
        for (ids,), (others,) in zip(first, second, strict=False):
            script.step(ids, others)


def evaluates(script: Script) -> None:
    """Before the loop, amid an epoch and behind it; now and then it is broken off."""
    loader, valid, sample = sharded(), sharded(8), sharded(20)

    def look() -> None:
        batches = [ids for (ids,) in valid]
        for (ids,) in sample:
            batches.append(ids)
            break
        script.member.barrier()
        script.step(torch.cat(batches))

    def only_read() -> None:
        for _ in valid:
            pass
        for _ in sample:
            break

    only_read()
    for _ in range(loader.epoch, 3):
        for (ids,) in loader:
            script.step(ids)
            if loader.consumed % 16 == 8:
                only_read()
        only_read()
    look()


@pytest.mark.slow
@pytest.mark.parametrize("script", [side_by_side, evaluates])
@pytest.mark.parametrize("dies", [1, 2, 3, 5, 6, 7, 10, 13])
def test_loaders_beside_the_one_that_is_trained_on_are_where_they_were(
    at: Callable[..., Lives], script: Callable[[Script], None], dies: int
) -> None:
    assert played(at(), script, dies) == played(at(), script)


# -- another batch --------------------------------------------------------------------------------


def skips(script: Script) -> None:
    for number, (ids,) in enumerate(sharded()):
        if script.life == 1 or number:
            script.step(ids)


def never_steps(script: Script) -> None:
    loader = sharded()
    for _ in range(loader.epoch, 2):
        for (ids,) in loader:
            if script.life == 1:
                script.step(ids)


def inside_each_other(script: Script) -> None:
    """Which batch of the outer one it was is not known."""
    outer, inner = sharded(), sharded(8)
    for (others,) in outer:
        for (ids,) in inner:
            script.step(ids, others)


class Chance(Sampler[int]):
    """Its order is another one each time."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        Chance.begun += 1
        return iter([(Chance.begun + n) % RECORDS for n in range(RECORDS)])

    def __len__(self) -> int:
        return RECORDS


def draws(script: Script) -> None:
    data = TensorDataset(torch.arange(RECORDS).reshape(RECORDS, 1))
    for (ids,) in fleet.shard(DataLoader(data, BATCH, sampler=Chance())):
        script.step(ids)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (skips, r"makes a step with .* sample 12 of epoch 0 .*, not with .* sample 8 of"),
        (never_steps, "has ended its loop without it"),
        (inside_each_other, "makes a step with the batch of loader 0"),
        (draws, r"makes a step with .* sample 8 of epoch 0 \(records \w+\), not"),
    ],
)
def test_a_step_on_another_batch_is_not_left_out(
    at: Callable[..., Lives], script: Callable[[Script], None], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        played(at(), script, dies=2)


# -- where nobody can go on -----------------------------------------------------------------------


def feeds_itself(script: Script) -> None:
    """Behind a step that a later life could have gone on from."""
    for number, (ids,) in enumerate(sharded()):
        script.step(ids)
        if number == 1:
            break
    with ThreadPoolExecutor(1) as ahead:
        batches = iter(sharded())
        for _ in range(3):
            script.step(ahead.submit(next, batches).result()[0])


class Opaque:
    """Nothing that can be written down."""


def holds_its_own(script: Script) -> None:
    for number, (ids,) in enumerate(sharded()):
        if number == 2:
            script.member.optimizer.param_groups[0]["mine"] = Opaque()
        script.step(ids)


@in_modes
@pytest.mark.parametrize(
    ("script", "why"),
    [(feeds_itself, "a batch that no loader of fleet.shard"), (holds_its_own, "Opaque")],
)
def test_one_that_cannot_go_on_says_why_in_place_of_going_back(
    at: Callable[..., Lives], script: Callable[[Script], None], why: str, mode: str
) -> None:
    job = at(mode)
    told = rf"restarted alone, but cannot resume where it died: .*{why}"
    with pytest.raises(ConfigError, match=told):
        played(job, script, dies=3)
    assert job.returns == [True, False]


def test_one_that_could_not_may_be_able_to_later(at: Callable[..., Lives]) -> None:
    def script(script: Script) -> None:
        loader = sharded()
        for number, (ids,) in enumerate(loader):
            if not number and script.life == 1:
                script.member.context.replay.forget_position()
            script.step(ids)

    job = at()
    assert played(job, script, dies=2) == played(at(), script)
    assert job.returns[:3] == [True, False, True]


def test_amid_the_load_of_a_checkpoint_nobody_goes_on(
    at: Callable[..., Lives], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(script: Script) -> None:
        for number, (ids,) in enumerate(sharded()):
            script.step(ids)
            if number == 1:
                fleet.save_persistables(str(tmp_path / "ckpt"))
                with monkeypatch.context() as patch:
                    patch.setattr(loading, "_load_from", dies)
                    fleet.load_persistables(str(tmp_path / "ckpt"))

    def dies(*_: Any) -> None:
        raise Died

    with pytest.raises(ConfigError, match="it was loading a checkpoint"):
        played(at("async"), script, dies=9)


# -- how much is written --------------------------------------------------------------------------


class Large(Own):
    """With a table of its own that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(1 << 16, dtype=torch.float32))


def build_large() -> Built:
    model = Large()
    return model, [torch.optim.SGD(model.linear.parameters(), lr=0.1)]


def test_what_is_large_and_stays_is_written_once(
    at: Callable[..., Lives], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = 0, os.pwritev

    def counted(fd: int, buffers: Any, offset: int) -> int:
        nonlocal written
        written += (done := write(fd, buffers, offset))
        return done

    def script(script: Script) -> None:
        model: Any = script.member.model
        for number, (ids,) in enumerate(sharded()):
            script.step(ids)
            if number == 1:
                # nothing that torch counts
                model.table.numpy()[:] += 1

    monkeypatch.setattr(os, "pwritev", counted)
    size = 4 << 16
    seen = played(at(build=build_large), script)
    assert 2 * size < written < 3 * size
    assert seen[-1][-1][:2] == [1, 2]
    job = at(build=build_large)
    assert played(job, script, dies=4) != seen  # the script counts anew
    # the newest one, and the one that the commit before may still need
    assert len(list(job.folder.glob("kept.*"))) <= 2
