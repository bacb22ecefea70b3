# SPDX-License-Identifier: Apache-2.0
"""Replay in a restarted worker: its script resumes after the step in which it died."""

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
from fleetlight.fleet.served.session import ServerSession
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


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., RestartableJob]]:
    """Creates jobs, each with its own folder."""
    made: list[RestartableJob] = []

    def make(*arguments: Any, **more: Any) -> RestartableJob:
        made.append(RestartableJob(tmp_path / str(len(made)), *arguments, **more))
        return made[-1]

    yield make
    for job in made:
        for server in job.servers:
            server.close()


# -- state that only the worker has ---------------------------------------------------------------


@in_modes
@pytest.mark.parametrize("large", [0, 1 << 16])
@pytest.mark.parametrize("dies", [1, 4, 9])
def test_replay_restores_frozen_parameters_changed_by_the_script(
    new_job: Callable[..., RestartableJob],
    mode: str,
    dies: int,
    large: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "_LARGE", large)
    starts: list[int] = []

    def script(member: Member, dies: int) -> Any:
        model: Any = member.model
        member.session.open(member.context)
        loader = sharded()
        starts.append(0)
        for _ in range(loader.epoch, 2):
            for (ids,) in loader:
                train(member, ids * (1 + int(model.whole)))
                member.communicator.flush()
                if len(starts) == 1 and model.whole == dies:
                    raise Died
                # changed without gradients, like a teacher that follows its student or an average
                model.frozen.data.mul_(0.9)
                model.frozen.data = model.frozen.data + model.linear.weight.data[0, :3]
                model.whole.add_(1)
                model.seen.copy_(ids[:2, 0])
        return outcome(member)

    uninterrupted = new_job(mode).run_incarnation(lambda member: script(member, -1))
    starts.clear()
    job = new_job(mode)
    assert isinstance(job.run_incarnation(lambda member: script(member, dies)), Died)
    assert job.run_incarnation(lambda member: script(member, dies)) == uninterrupted


# -- where it resumes -----------------------------------------------------------------------------


@pytest.mark.parametrize("compacts", [False, True])
def test_restarted_worker_does_not_agree_on_first_values_again(
    new_job: Callable[..., RestartableJob], compacts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second agreement on first values would lose the training of the first incarnation."""
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

    uninterrupted = new_job().run_incarnation(lambda member: script(member, -1))
    job = new_job()
    assert isinstance(job.run_incarnation(lambda member: script(member, 3)), Died)
    assert job.run_incarnation(lambda member: script(member, -1)) == uninterrupted


@in_modes
def test_catching_up_exchanges_nothing_with_servers(
    new_job: Callable[..., RestartableJob], mode: str
) -> None:
    """Barriers and saves before the loop belong to the incarnation that made them."""
    exchanged: list[list[str]] = []

    def script(member: Member, dies: int) -> Any:
        member.session.open(member.context)
        calls: list[str] = []
        exchanged.append(calls)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("settle", "resume"):
                whole = getattr(member.communicator, name)
                record = lambda name=name, whole=whole: (calls.append(name), whole())  # noqa: E731
                patch.setattr(member.communicator, name, record)
            member.barrier()
            with member.context.at_rest(everything=True):
                pass
        for step, (ids,) in enumerate(sharded()):
            train(member, ids)
            if step == dies:
                raise Died

    job = new_job(mode)
    assert isinstance(job.run_incarnation(lambda member: script(member, 2)), Died)
    assert job.run_incarnation(lambda member: script(member, -1)) is None
    assert exchanged == [["settle", "resume", "settle", "resume"], []]


@pytest.mark.parametrize("dies", [1, 4])
def test_a_skipped_step_is_not_clipped_again(
    new_job: Callable[..., RestartableJob], dies: int
) -> None:
    """The servers clip with the step: a second clip would hold gradients that no step applies."""

    def script(member: Member, dies: int) -> Any:
        norms = []
        for step, (ids,) in enumerate(sharded()):
            member.optimizer.zero_grad()
            loss_of(member.model, ids, torch.zeros(len(ids), 1)).backward()
            norms.append(member.clip(0.01))
            member.optimizer.step()
            if step == dies:
                raise Died
        assert all(norms)
        return outcome(member)

    uninterrupted = new_job().run_incarnation(lambda member: script(member, -1))
    job = new_job()
    assert isinstance(job.run_incarnation(lambda member: script(member, dies)), Died)
    with pytest.MonkeyPatch.context() as patch:
        clipped: list[int] = []
        clip = ServerSession.clip
        patch.setattr(ServerSession, "clip", lambda *given: (clipped.append(1), clip(*given))[1])
        assert job.run_incarnation(lambda member: script(member, -1)) == uninterrupted
    assert len(clipped) == RECORDS // BATCH - dies - 1


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


def side_by_side(script: Script) -> None:
    """The second loader is shorter, so its epochs differ."""
    first, second = sharded(), sharded(20)
    for _ in range(first.epoch, 3):
        for (ids,), (others,) in zip(first, second, strict=False):
            script.step(ids, others)


def evaluates(script: Script) -> None:
    """Evaluates before the loop, during an epoch and after it; some loops break early."""
    loader, valid, sample = sharded(), sharded(8), sharded(20)

    def evaluate() -> None:
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
    evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("script", [side_by_side, evaluates])
@pytest.mark.parametrize("dies", [1, 2, 3, 5, 6, 7, 10, 13])
def test_replay_restores_the_positions_of_all_loaders(
    new_job: Callable[..., RestartableJob], script: Callable[[Script], None], dies: int
) -> None:
    assert run_with_restart(new_job(), script, dies) == run_with_restart(new_job(), script)


# -- another batch after the restart --------------------------------------------------------------


def skips(script: Script) -> None:
    for number, (ids,) in enumerate(sharded()):
        if script.incarnation == 1 or number:
            script.step(ids)


def never_steps(script: Script) -> None:
    loader = sharded()
    for _ in range(loader.epoch, 2):
        for (ids,) in loader:
            if script.incarnation == 1:
                script.step(ids)


def nested(script: Script) -> None:
    """The batch of the outer loader is unknown."""
    outer, inner = sharded(), sharded(8)
    for (others,) in outer:
        for (ids,) in inner:
            script.step(ids, others)


class ChangingSampler(Sampler[int]):
    """Its order changes with each pass."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        ChangingSampler.passes += 1
        return iter([(ChangingSampler.passes + n) % RECORDS for n in range(RECORDS)])

    def __len__(self) -> int:
        return RECORDS


def reorders(script: Script) -> None:
    data = TensorDataset(torch.arange(RECORDS).reshape(RECORDS, 1))
    for (ids,) in fleet.shard(DataLoader(data, BATCH, sampler=ChangingSampler())):
        script.step(ids)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (skips, r"makes a step with .* sample 12 of epoch 0 .*, not with .* sample 8 of"),
        (never_steps, "has ended its loop without it"),
        (nested, "makes a step with the batch of loader 0"),
        (reorders, r"makes a step with .* sample 8 of epoch 0 \(records \w+\), not"),
    ],
)
def test_replay_does_not_skip_a_step_on_another_batch(
    new_job: Callable[..., RestartableJob], script: Callable[[Script], None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_with_restart(new_job(), script, dies=2)


# -- a worker that cannot resume ------------------------------------------------------------------


def feeds_itself(script: Script) -> None:
    """After a step from which the next incarnation could have resumed."""
    for number, (ids,) in enumerate(sharded()):
        script.step(ids)
        if number == 1:
            break
    with ThreadPoolExecutor(1) as ahead:
        batches = iter(sharded())
        for _ in range(3):
            script.step(ahead.submit(next, batches).result()[0])


class Opaque:
    """An object that cannot be saved."""


def holds_opaque_state(script: Script) -> None:
    for number, (ids,) in enumerate(sharded()):
        if number == 2:
            script.member.optimizer.param_groups[0]["mine"] = Opaque()
        script.step(ids)


@in_modes
@pytest.mark.parametrize(
    ("script", "why"),
    [(feeds_itself, "a batch that no loader of fleet.shard"), (holds_opaque_state, "Opaque")],
)
def test_worker_that_cannot_resume_says_why(
    new_job: Callable[..., RestartableJob], script: Callable[[Script], None], why: str, mode: str
) -> None:
    job = new_job(mode)
    message = rf"restarted alone, but cannot resume where it died: .*{why}"
    with pytest.raises(ConfigError, match=message):
        run_with_restart(job, script, dies=3)
    assert job.returns == [True, False]


def test_worker_can_resume_after_its_next_recorded_step(
    new_job: Callable[..., RestartableJob],
) -> None:
    def script(script: Script) -> None:
        loader = sharded()
        for number, (ids,) in enumerate(loader):
            if not number and script.incarnation == 1:
                script.member.context.replay.forget_position()
            script.step(ids)

    job = new_job()
    assert run_with_restart(job, script, dies=2) == run_with_restart(new_job(), script)
    assert job.returns[:3] == [True, False, True]


def test_worker_does_not_resume_during_the_load_of_a_checkpoint(
    new_job: Callable[..., RestartableJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        run_with_restart(new_job("async"), script, dies=9)


# -- how much is written --------------------------------------------------------------------------


class Large(Own):
    """A model with a large buffer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(1 << 16, dtype=torch.float32))


def build_large() -> Built:
    model = Large()
    return model, [torch.optim.SGD(model.linear.parameters(), lr=0.1)]


def test_large_unchanged_tensors_are_written_once(
    new_job: Callable[..., RestartableJob], monkeypatch: pytest.MonkeyPatch
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
                # a change that torch's version counter does not see
                model.table.numpy()[:] += 1

    monkeypatch.setattr(os, "pwritev", counted)
    size = 4 << 16
    seen = run_with_restart(new_job(build=build_large), script)
    assert 2 * size < written < 3 * size
    assert seen[-1][-1][:2] == [1, 2]
    job = new_job(build=build_large)
    assert run_with_restart(job, script, dies=4) != seen  # the script counts from zero again
    # the newest file, and one that the previous commit may still need
    assert len(list(job.folder.glob("kept.*"))) <= 2
