# SPDX-License-Identifier: Apache-2.0
"""Automatic saves: jobs that save at intervals, stop on SIGTERM and resume."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.workers import WorkerFailedError, run_processes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import checkpoint
from fleetlight.checkpoint.storage import generations
from fleetlight.checkpoint.storage.manifest import VERSION, encode
from fleetlight.errors import MembershipError, StoppedError
from fleetlight.fleet.checkpoints.autosave import RESUME_CODE, JobAutosave, Stopped
from fleetlight.fleet.job import current
from fleetlight.fleet.served.stop_agreement import ServedAgreement
from fleetlight.wire.control_signals import ControlSignal, WorkerSignals

pytestmark = pytest.mark.multiprocess

EPOCHS, RECORDS = 3, 24
#: what the script does after each step, and after each epoch
Hook = Callable[[int], None]


def nothing(_: int) -> None:
    pass


class Job:
    """The script that most of these tests run; `seen` are the records of this worker."""

    def __init__(self, dirname: str, *, resume: bool = False, width: int = 6, **configs: Any):
        os.environ["FLEET_CHECKPOINT"] = dirname
        os.environ["FLEET_RESUME"] = str(int(resume))
        strategy = fleet.DistributedStrategy(checkpoint_configs={"every_s": 0.0, **configs})
        fleet.init(is_collective=True, strategy=strategy)
        torch.manual_seed(0)
        layers = [nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 1)]
        self.model = fleet.distributed_model(nn.Sequential(*layers).double())
        adam = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.optimizer = fleet.distributed_optimizer(adam)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.5)
        fleet.attach(scheduler=self.scheduler)
        bound = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(9)).double()
        data = TensorDataset(torch.arange(RECORDS), bound)
        batch = 6 // fleet.worker_num()
        self.loader = fleet.shard(DataLoader(data, batch_size=batch, shuffle=True))
        self.valid = fleet.shard(DataLoader(data, batch_size=batch))
        self.seen: list[tuple[int, int]] = []
        self.has_cleaned_up = False

    def backward(self, x: torch.Tensor) -> None:
        (self.model(x).squeeze(1) - x.sum(1)).square().mean().backward()

    def train(self, after_step: Hook = nothing, after_epoch: Hook = nothing) -> None:
        steps = 0
        try:
            for epoch in range(self.loader.epoch, EPOCHS):
                for ids, x in self.loader:
                    self.seen += [(epoch, int(i)) for i in ids[: self.loader.counted]]
                    self.optimizer.zero_grad()
                    self.backward(x)
                    self.optimizer.step()
                    self.scheduler.step()
                    steps += 1
                    after_step(steps)
                after_epoch(epoch)
        finally:
            self.has_cleaned_up = True

    def result(self) -> Any:
        values = [p.detach().tolist() for p in self.model.parameters()]
        return values, self.scheduler.last_epoch, self.seen


def terminate(steps: int, at: int, worker: int = 0) -> None:
    if steps == at and fleet.worker_index() == worker:
        os.kill(os.getpid(), signal.SIGTERM)


def whole(dirname: str) -> Any:
    job = Job(dirname)
    job.train()
    return job.result()


def stop(dirname: str, at: int) -> Any:
    """Only the last worker receives SIGTERM; all stop."""
    job = Job(dirname)
    with pytest.raises(Stopped) as stopped:
        job.train(lambda steps: terminate(steps, at, fleet.worker_num() - 1))
    assert stopped.value.code == RESUME_CODE
    assert job.has_cleaned_up
    fleet.stop_worker()
    return job.seen


def resume_job(dirname: str) -> Any:
    job = Job(dirname, resume=True)
    job.train()
    return job.result()


def run(function: Any, workers: int, *args: Any) -> list[Any]:
    return run_processes(function, [args] * workers)


@pytest.mark.parametrize("at", [1, 4, 6])
def test_stop_and_resume_equal_an_uninterrupted_job_bit_for_bit(tmp_path: Path, at: int) -> None:
    """Dropout, learning rates and the order of records are those of an uninterrupted job."""
    expected = run(whole, 2, str(tmp_path / "unused"))
    path = str(tmp_path / "ckpt")
    before = run(stop, 2, path, at)
    saved = checkpoint.read(path)
    assert at <= saved.manifest.step < 12
    after = run(resume_job, 2, path)
    for uninterrupted, mine, rest in zip(expected, before, after, strict=True):
        assert uninterrupted[0] == rest[0]
        assert uninterrupted[1] == rest[1] == 12
        assert uninterrupted[2] == mine + rest[2]


@pytest.mark.parametrize("workers", [3, 1])
def test_any_number_of_workers_resumes_and_reads_each_record_once(
    tmp_path: Path, workers: int
) -> None:
    path = str(tmp_path / "ckpt")
    before = run(stop, 2, path, 2)
    after = [answer[2] for answer in run(resume_job, workers, path)]
    seen = sorted(record for part in (*before, *after) for record in part)
    assert seen == [(epoch, i) for epoch in range(EPOCHS) for i in range(RECORDS)]


def accumulate(dirname: str) -> Any:
    """Two batches make a step; no save may come between them."""
    job = Job(dirname)
    with contextlib.suppress(Stopped):
        for number, (_, x) in enumerate(itertools.chain(job.loader, job.loader)):
            terminate(number, 2)
            if number % 2 == 0:
                with fleet.no_sync():
                    job.backward(x)
            else:
                job.backward(x)
                job.optimizer.step()
    position = job.loader.state_dict()
    fleet.stop_worker()
    return position["epoch"], position["consumed"]


def test_stop_waits_for_the_end_of_an_accumulated_step(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    assert run(accumulate, 1, path) == [(1, 0)]
    assert checkpoint.read(path).manifest.step == 2


def validate(dirname: str) -> Any:
    """SIGTERM arrives during validation; the job finishes the validation before it stops."""
    job, done = Job(dirname), []

    def after_epoch(epoch: int) -> None:
        for number, (_, x) in enumerate(job.valid):
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            job.model(x)
        done.append(epoch)

    with contextlib.suppress(Stopped):
        job.train(after_epoch=after_epoch)
    fleet.stop_worker()
    return done


def test_stop_does_not_interrupt_an_evaluation(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    assert run(validate, 1, path) == [[0]]
    saved = checkpoint.read(path).worker(0)
    assert saved is not None
    position = saved.values["loaders"][0]
    assert (position["epoch"], position["consumed"]) == (1, 0)


def feed_itself(dirname: str) -> Any:
    job, made = Job(dirname), 0
    with contextlib.suppress(Stopped):
        for step in range(9):
            made = step
            job.optimizer.zero_grad()
            job.backward(torch.ones(3, 4).double())
            terminate(step, 3)
            job.optimizer.step()
    fleet.stop_worker()
    return made


def test_job_without_a_sharded_loader_stops_after_a_step(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    assert run(feed_itself, 1, path) == [3]
    assert checkpoint.read(path).manifest.step == 4


def save_at_intervals(dirname: str, configs: dict[str, Any]) -> Any:
    """The saved steps; each step waits for the end of its write."""
    job, saved = Job(dirname, **configs), []

    def after_step(_: int) -> None:
        current().background_save.finish()
        with contextlib.suppress(fleet.errors.CheckpointError):
            saved.append(checkpoint.read(dirname).manifest.step)

    job.train(after_step)
    fleet.stop_worker()
    return sorted(set(saved))


def test_every_steps_saves_at_that_interval(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    # a save due after the last batch of an epoch waits until the next epoch begins
    assert run(save_at_intervals, 2, path, {"every_steps": 3})[0] == [3, 6, 9]


def test_every_s_saves_at_that_interval(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    saved = run(save_at_intervals, 2, path, {"every_s": 1e-6})[0]
    assert saved[0] == 1
    # workers do not poll each other at every step
    assert len(saved) >= 3


def resume_saving(dirname: str) -> int:
    job = Job(dirname, resume=True, every_steps=3)
    job.train()
    fleet.stop_worker()
    return checkpoint.read(dirname).manifest.step


def test_resumed_job_continues_to_save(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run(stop, 1, path, 2)
    # from step 2 on, and step 8 is the last of an epoch
    assert run(resume_saving, 1, path) == [11]


def end_early(dirname: str) -> None:
    """Dies during the write of the save at the stop."""
    job = Job(dirname, every_steps=2)

    def after_step(steps: int) -> None:
        if steps == 5:
            current().background_save.finish()
            generations.sync_folder_if_supported = lambda path: os._exit(9)
            os.kill(os.getpid(), signal.SIGTERM)

    job.train(after_step)


def test_job_killed_during_its_last_save_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    with pytest.raises(WorkerFailedError, match="died without a result"):
        run(end_early, 1, path)
    saved = checkpoint.read(path)
    saved.verify()
    assert saved.manifest.step == 4
    assert len(run(resume_job, 1, path)[0][2]) == EPOCHS * RECORDS - 4 * 6


# --- which jobs may resume


def test_job_does_not_overwrite_a_checkpoint_it_did_not_load(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run(stop, 1, path, 2)
    with pytest.raises(
        WorkerFailedError,
        match=r"ckpt holds the checkpoint of an earlier job \(step 2, .*--resume",
    ):
        run(whole, 2, path)
    assert checkpoint.read(path).manifest.step == 2


def test_resume_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    for _ in range(2):
        with pytest.raises(WorkerFailedError, match=r"ckpt: there is no checkpoint to resume from"):
            run(resume_job, 2, str(path))
        # what an interrupted first save leaves
        path.mkdir(exist_ok=True)


def test_checkpoint_of_another_version_names_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    run(stop, 1, str(path), 2)
    other = msgspec.structs.replace(checkpoint.read(path).manifest, version=VERSION + 1)
    (path / "manifest.json").write_bytes(encode(other))
    text = rf"format version {VERSION + 1}, expected {VERSION}; use the Fleetlight that wrote it"
    with pytest.raises(WorkerFailedError, match=text):
        run(resume_job, 2, str(path))


def other_model(dirname: str) -> None:
    Job(dirname, resume=True, width=7).train()


def test_resume_with_another_model_names_the_first_difference(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run(stop, 1, path, 2)
    text = r"tensor '0\.weight' is float64\[7, 4\] here, but float64\[6, 4\] in the checkpoint"
    with pytest.raises(WorkerFailedError, match=text):
        run(other_model, 2, path)


def restart_job(dirname: str) -> Any:
    os.environ["FLEET_RESTART"] = "1"
    job = Job(dirname)
    job.train()
    return job.result()


def test_restart_resumes_from_a_checkpoint_if_one_exists(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    assert len(run(restart_job, 1, path)[0][2]) == EPOCHS * RECORDS
    run(stop, 1, path, 2)
    assert len(run(restart_job, 1, path)[0][2]) == EPOCHS * RECORDS - 2 * 6


# --- the signal


def look_at_handlers(dirname: str | None) -> Any:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    if dirname is None:
        fleet.init(is_collective=True)
        assert signal.getsignal(signal.SIGTERM) is mine
    else:
        Job(dirname)
        os.kill(os.getpid(), signal.SIGTERM)
    fleet.stop_worker()
    assert signal.getsignal(signal.SIGTERM) is mine
    return received


def test_signal_handler_of_the_script_is_also_called(tmp_path: Path) -> None:
    assert run(look_at_handlers, 1, str(tmp_path / "ckpt")) == [[signal.SIGTERM]]
    assert run(look_at_handlers, 1, None) == [[]]


def wait(started: Any, never: Any) -> None:
    started.set()
    never.wait()


def end_child(dirname: str) -> Any:
    Job(dirname)
    context = multiprocessing.get_context("fork")
    started, never = context.Event(), context.Event()
    child = context.Process(target=wait, args=(started, never))
    child.start()
    # a signal that arrives during a fork is lost for any handler
    started.wait()
    child.terminate()
    child.join()
    fleet.stop_worker()
    return child.exitcode


def test_sigterm_ends_a_forked_child_as_usual(tmp_path: Path) -> None:
    assert run(end_child, 1, str(tmp_path / "ckpt")) == [-signal.SIGTERM]


def insist(dirname: str) -> None:
    Job(dirname)
    # an engine and its launcher may both pass one request on
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    Path(f"{dirname}.alive").touch()
    current().autosave._seen_at -= 60.0  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("it should be gone")


def test_a_later_second_signal_ends_the_process(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="died without a result"):
        run(insist, 1, str(tmp_path / "ckpt"))
    assert (tmp_path / "ckpt.alive").exists()


def never_step(dirname: str) -> None:
    Job(dirname, grace_s=0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def test_worker_that_makes_no_step_ends_after_the_grace_period(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="died without a result"):
        run(never_step, 1, str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()


def wait_for_others(grace_s: float, *active: int | None) -> Any:
    """Worker 0 waits for the others; each heartbeat returns server 0's next count."""
    counts = iter(active)

    def beat(step: int) -> None:
        client.active_workers = next(counts, client.active_workers)

    client: Any = SimpleNamespace(heartbeat=beat, active_workers=None, signals=WorkerSignals())
    plan = SimpleNamespace(steps_together=False, serves_dense=True)
    session: Any = SimpleNamespace(is_open=True, bound=SimpleNamespace(plan=plan))
    context: Any = SimpleNamespace(step=7)
    group: Any = SimpleNamespace(index=0, client=client)
    ServedAgreement(context, session, group).prepare_stop(grace_s)
    return client.active_workers


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("active", "others"), [(3, "2"), (1, None), (None, "server 0 does not report how many")]
)
def test_workers_that_do_not_leave_in_time_are_logged(
    active: int | None, others: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted worker may need long."""
    wait_for_others(0.01, active)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (others is not None)
    assert all(
        text.startswith(f"saving while other workers still train ({others}): their")
        for text in messages
    )


class WaitingWorker:
    """A worker that waits for a missing peer; `done` lists its reactions."""

    def __init__(self, *, lockstep: bool = False, received: bool = False, stepped: bool = True):
        self.done: list[str] = []
        autosave: Any = object.__new__(JobAutosave)
        plan = SimpleNamespace(steps_together=lockstep, serves_dense=True)
        signals = SimpleNamespace(received=ControlSignal(stop=received))
        client = SimpleNamespace(signals=signals)
        session: Any = SimpleNamespace(is_open=True, bound=SimpleNamespace(plan=plan))
        group: Any = SimpleNamespace(client=client)
        autosave._agreement = ServedAgreement(SimpleNamespace(), session, group)  # type: ignore[arg-type]
        autosave.seen, autosave.has_stopped, autosave._has_stepped = False, False, stepped
        autosave._trained = [
            SimpleNamespace(
                cursor=SimpleNamespace(is_being_read=True, put_back=self.record("put back"))
            )
        ]
        autosave._stop = self.record("stop")
        self.autosave = autosave

    def record(self, what: str) -> Callable[[], None]:
        return lambda: self.done.append(what)

    def waits(self, error: type[MembershipError] = StoppedError) -> list[str]:
        self.autosave.peer_missing(error("worker 1 has left"))
        return self.done


def test_worker_that_waits_for_a_stopping_peer_stops_too() -> None:
    assert WaitingWorker().waits() == ["stop"]
    # a batch that was handed out but not trained on
    assert WaitingWorker(stepped=False).waits() == ["put back", "stop"]
    # a server may not know why the other worker has left
    assert WaitingWorker(received=True).waits(MembershipError) == ["stop"]
    assert WaitingWorker().waits(MembershipError) == []
    # in lockstep all workers stop together and save at a barrier
    assert WaitingWorker(lockstep=True).waits() == []


def test_stopped_worker_does_not_save_again() -> None:
    waiting = WaitingWorker()
    waiting.autosave.has_stopped = True
    with pytest.raises(Stopped):
        waiting.waits()
    assert waiting.done == []


def test_worker_waits_for_others_while_their_number_is_unknown() -> None:
    # a worker restarted just now has no count yet
    assert wait_for_others(60, None, 2, 2, 1) == 1
