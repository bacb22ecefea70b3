# SPDX-License-Identifier: Apache-2.0
"""Loaders with deal="queue" in jobs of threads: who reads which records, and checkpoints."""

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.served import ASYNC, SYNC, Built, Job, Member, Net, geo, loss_of
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.collective.group import Group
from fleetlight.data import ShardLoader
from fleetlight.errors import ConfigError, MembershipError, PlanError
from fleetlight.fleet.checkpoints import loading, persistables
from fleetlight.fleet.checkpoints.save_options import SaveOptions
from fleetlight.fleet.collective.job import CollectiveJob
from fleetlight.fleet.job import set_current
from fleetlight.fleet.served.shard_queue import NoShardQueue, ShardQueueClient
from fleetlight.ps.server.shard_queue import handler as dealing
from fleetlight.roles import Role

SSP = {"a_sync": True, "a_sync_configs": {"staleness": 2}}
MODES = {"async": ASYNC, "merged": {"a_sync": True, "a_sync_configs": {"max_merge": 4}}}
MODES |= {"ssp": SSP, "geo": geo(3)}
in_modes = pytest.mark.parametrize("mode", MODES)
LENGTH, BATCH = 96, 4


@pytest.fixture(autouse=True)
def _wait_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "_WAIT_S", 0.02)


def build() -> Built:
    model = Net()
    return model, [torch.optim.SGD(model.parameters(), lr=0.01)]


def loader_of(member: Member, length: int = LENGTH, **more: Any) -> ShardLoader:
    """As `fleet.shard` makes it, for one of several contexts in a process."""
    data = TensorDataset(torch.arange(3 * length).reshape(length, 3))
    loader = ShardLoader(
        DataLoader(data, BATCH, shuffle=True),
        worker=member.index,
        workers=member.context.group.size,
        seed=0,
        tail="join",
        queue=member.context.shard_queue(more.get("range_batches", 2)),
    )
    member.context.loaders.append(loader)
    return loader


def step(member: Member, batch: Any) -> list[int]:
    """Train on a batch; returns its records."""
    [ids] = batch
    member.descend(loss_of(member.model, ids, torch.zeros(len(ids), 1)))
    return [int(first) // 3 for first in ids[:, 0]]


def read(found: list[list[list[int]]]) -> list[int]:
    return sorted(record for batches in found for batch in batches for record in batch)


def run(work: Callable[[Member], Any], mode: str = "async", workers: int = 2, **more: Any) -> Any:
    return Job(build, MODES.get(mode, SYNC), workers=workers, servers=2, **more).run(work)


@in_modes
def test_epoch_has_every_record_once(mode: str) -> None:
    def work(member: Member) -> Any:
        loader = loader_of(member)
        epochs = []
        for _ in range(3):
            epochs.append([step(member, batch) for batch in loader])
            # no push is in flight
            assert member.communicator.made == member.communicator.acknowledged
        member.barrier()
        return epochs

    found = run(work, mode, workers=3)
    for epoch in range(3):
        assert read([epochs[epoch] for epochs in found]) == list(range(LENGTH))


@in_modes
def test_slow_worker_reads_fewer_records(mode: str) -> None:
    """It waits until the others have read all records but its own range."""
    # a staleness bound ties fast workers to slow ones
    share = 4 if mode == "ssp" else LENGTH // BATCH - 2
    is_done = threading.Event()

    def work(member: Member) -> Any:
        loader, batches = loader_of(member), []
        for batch in loader:
            if member.index == 0 and not batches:
                assert is_done.wait(20)
            batches.append(step(member, batch))
            if member.index == 1 and len(batches) == (1 if mode == "ssp" else share):
                is_done.set()
        return batches

    found = run(work, mode)
    assert read(found) == list(range(LENGTH))
    if mode != "ssp":
        assert [len(batches) for batches in found] == [2, share]


def test_single_worker_reads_all_records() -> None:
    def work(member: Member) -> Any:
        loader = loader_of(member)
        return [step(member, batch) for batch in loader], loader.epoch

    [(batches, epoch)] = run(work, workers=1)
    assert (read([batches]), epoch) == (list(range(LENGTH)), 1)


@in_modes
def test_other_workers_finish_after_one_leaves(mode: str) -> None:
    """It leaves its loop, or the job."""

    def work(member: Member) -> Any:
        loader, batches = loader_of(member), []
        for batch in loader:
            batches.append(step(member, batch))
            if member.index == 0 and len(batches) == 3:
                break
        return batches

    found = run(work, mode)
    assert read(found) == list(range(LENGTH))
    assert len(found[0]) == 3


@in_modes
def test_idle_worker_that_resumes_stays_in_the_same_phase(mode: str) -> None:
    """It starts from the servers' values; with a staleness bound others wait for it again."""
    job = Job(build, MODES[mode], workers=2, servers=1)
    server = job.servers[0]
    has_begun, is_dry = threading.Event(), threading.Event()

    def ended() -> int:
        with server._changed:
            assert server._service is not None
            _, phases = server._service.pushes.progress.clocks.state()
            return phases[0]

    def work(member: Member) -> Any:
        loader, batches = loader_of(member, 5 * BATCH), []
        if member.index == 0:
            assert has_begun.wait(20)
        for batch in loader:
            if member.index == 1:
                # the first of two batches
                batches.append(step(member, batch))
                member.communicator.flush()
                has_begun.set()
                # worker 0 reads the rest, then waits for this one without ending its phase
                with server._changed:
                    while not server._membership.shard_queue.queue.waits_for(0):
                        server._presence.check()
                        server._changed.wait(0.01)
                assert ended() == 0
                step(member, batch)
                is_dry.set()
                break
            if is_dry.is_set():
                local = parameters_to_vector(member.model.linear.parameters()).clone()
                member.communicator.pull_dense()
                assert torch.equal(local, parameters_to_vector(member.model.linear.parameters()))
            batches.append(step(member, batch))
            member.communicator.flush()
            assert member.communicator.phase == 0
            if mode != "geo":
                assert ended() == -1
        return batches

    found = job.run(work)
    assert is_dry.is_set()
    assert [len(batches) for batches in found] == [4, 1]
    assert read(found) == list(range(5 * BATCH))


def test_other_workers_read_the_records_of_a_lost_worker(caplog: pytest.LogCaptureFixture) -> None:
    """Its pushed records count as read, except those of its last step."""
    job = Job(build, ASYNC, workers=2, servers=1)
    has_begun, is_lost = threading.Event(), threading.Event()

    def work(member: Member) -> Any:
        loader, batches = loader_of(member, range_batches=4), []
        if member.index == 1:
            assert has_begun.wait(20)
        for batch in loader:
            if member.index == 0 and len(batches) == 6:
                server = job.servers[0]
                with server._changed:
                    server._membership.shard_queue.lose(0)
                has_begun.set()
                assert is_lost.wait(20)
                break
            batches.append(step(member, batch))
            # so that each request for a range reports the same steps at any speed of pushes
            member.communicator.flush()
        is_lost.set()
        return batches

    found = job.run(work)
    order = read(found)
    twice = {record for record in order if order.count(record) > 1}
    assert set(order) == set(range(LENGTH))
    # only records it had not reported yet
    assert twice <= {record for batch in found[0][2:] for record in batch}
    assert "worker 0 was lost before it finished records " in caplog.text


@pytest.mark.slow
@in_modes
@pytest.mark.parametrize("later", [3, 1])
def test_checkpoint_within_an_epoch_resumes_with_the_remaining_records(
    mode: str, later: int, tmp_path: Path
) -> None:
    def before(member: Member) -> Any:
        loader, batches = loader_of(member), []
        for batch in loader:
            batches.append(step(member, batch))
            if len(batches) == 2 + member.index:
                persistables._save(member.context, tmp_path, {}, SaveOptions())
                break
        return batches

    def after(member: Member) -> Any:
        loader = loader_of(member)
        loading.load_job(member.context, tmp_path)
        assert (loader.epoch, loader.consumed) == (0, 5 * BATCH)
        rest = [step(member, batch) for batch in loader]
        return rest, [step(member, batch) for batch in loader]

    found, rest = run(before, mode), run(after, mode, workers=later)
    assert read([*found, *(batches for batches, _ in rest)]) == list(range(LENGTH))
    assert read([batches for _, batches in rest]) == list(range(LENGTH))


def test_job_returns_to_its_checkpoint(tmp_path: Path) -> None:
    """From within the loop, more than once."""

    def work(member: Member) -> Any:
        loader = loader_of(member)
        attempts = []
        for attempt in range(3):
            batches = []
            for batch in loader:
                batches.append(step(member, batch))
                if attempt == 0 and len(batches) == 2:
                    persistables._save(member.context, tmp_path, {}, SaveOptions())
                    kept = list(batches)
                if attempt < 2 and len(batches) == 4:
                    break
            attempts.append(batches)
            if attempt < 2:
                loading.load_job(member.context, tmp_path)
        return [*kept, *attempts[2]]

    assert read(run(work)) == list(range(LENGTH))


def test_save_that_a_worker_cannot_join_is_refused(tmp_path: Path) -> None:
    is_waiting = threading.Event()

    def work(member: Member) -> Any:
        for batch in loader_of(member):
            step(member, batch)
            if member.index == 0:
                persistables._save(member.context, tmp_path, {}, SaveOptions())
        is_waiting.set()

    errors = Job(build, ASYNC, workers=2, servers=1).tried(work)
    assert isinstance(errors[0], MembershipError)
    assert "save_persistables of worker 0 would wait for worker 1" in str(errors[0])


def test_loaders_of_different_lengths_are_refused() -> None:
    def work(member: Member) -> Any:
        return [step(member, batch) for batch in loader_of(member, LENGTH + member.index)]

    errors = Job(build, ASYNC, workers=2, servers=1).tried(work)
    assert any("but other workers with records 0 to 9" in str(error) for error in errors)
    assert any(isinstance(error, PlanError) for error in errors)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (SYNC, "in sync mode all workers make each step together, so all need as many batches"),
        ({"a_sync": True, "a_sync_configs": {"dense": "allreduce"}}, "with dense='allreduce' all"),
    ],
)
def test_queue_is_refused_when_workers_step_together(strategy: dict[str, Any], text: str) -> None:
    def work(member: Member) -> Any:
        return list(loader_of(member))

    [error] = Job(build, strategy, workers=1, servers=1).tried(work)
    assert isinstance(error, ConfigError)
    assert text in str(error)


@pytest.fixture
def alone() -> Any:
    fleet.init()
    yield
    set_current(None)


@pytest.mark.usefixtures("alone")
def test_deal_of_shard_is_checked() -> None:
    with pytest.raises(ConfigError, match="got deal='queues'; did you mean 'queue'"):
        fleet.shard(DataLoader([1, 2]), deal="queues")
    assert not isinstance(fleet.shard(DataLoader([1, 2]), deal="queue").source, type(None))


def test_a_collective_job_has_no_queue() -> None:
    job = CollectiveJob(
        role=Role(), group=Group(deadline_s=20.0), strategy=fleet.DistributedStrategy()
    )
    with pytest.raises(ConfigError, match=r"a_sync=True; in a collective job all workers make"):
        job.shard_queue(16)


def test_loader_in_a_server_is_refused() -> None:
    queue = NoShardQueue()
    with pytest.raises(ConfigError, match="was read in a parameter server"):
        queue.remaining(1)
    assert queue.steps() == (0, 0)
    queue.settle()


def test_pickled_queue_client_is_none() -> None:
    nothing: Any = None
    assert pickle.loads(pickle.dumps(ShardQueueClient(nothing, nothing, 0))) is None
