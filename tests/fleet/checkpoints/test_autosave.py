# SPDX-License-Identifier: Apache-2.0
"""Jobs that save by themselves, are asked to stop, and go on."""

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
#: what the script does behind each step, and behind each epoch
Behind = Callable[[int], None]


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

    def train(self, behind: Behind = nothing, behind_epoch: Behind = nothing) -> None:
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
                    behind(steps)
                behind_epoch(epoch)
        finally:
            self.has_cleaned_up = True

    def answer(self) -> Any:
        values = [p.detach().tolist() for p in self.model.parameters()]
        return values, self.scheduler.last_epoch, self.seen


def terminate(steps: int, at: int, worker: int = 0) -> None:
    if steps == at and fleet.worker_index() == worker:
        os.kill(os.getpid(), signal.SIGTERM)


def whole(dirname: str) -> Any:
    job = Job(dirname)
    job.train()
    return job.answer()


def stop(dirname: str, at: int) -> Any:
    """The last worker is told; all hear it."""
    job = Job(dirname)
    with pytest.raises(Stopped) as stopped:
        job.train(lambda steps: terminate(steps, at, fleet.worker_num() - 1))
    assert stopped.value.code == RESUME_CODE
    assert job.has_cleaned_up
    fleet.stop_worker()
    return job.seen


def go_on(dirname: str) -> Any:
    job = Job(dirname, resume=True)
    job.train()
    return job.answer()


def run(function: Any, workers: int, *args: Any) -> list[Any]:
    return run_processes(function, [args] * workers)


@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_stop_changes_no_bit(tmp_path: Path, at: int) -> None:
    """Dropout, rates and the order of records are those of a job that was not stopped."""
    expected = run(whole, 2, str(tmp_path / "unused"))
    path = str(tmp_path / "ckpt")
    before = run(stop, 2, path, at)
    saved = checkpoint.read(path)
    assert at <= saved.manifest.step < 12
    after = run(go_on, 2, path)
    for one, mine, rest in zip(expected, before, after, strict=True):
        assert one[0] == rest[0]
        assert one[1] == rest[1] == 12
        assert one[2] == mine + rest[2]


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_goes_on_and_no_record_is_seen_twice(
    tmp_path: Path, workers: int
) -> None:
    path = str(tmp_path / "ckpt")
    before = run(stop, 2, path, 2)
    after = [answer[2] for answer in run(go_on, workers, path)]
    seen = sorted(record for part in (*before, *after) for record in part)
    assert seen == [(epoch, i) for epoch in range(EPOCHS) for i in range(RECORDS)]


def accumulate(dirname: str) -> Any:
    """Two batches make a step: between them nothing may be saved."""
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


def test_what_has_been_accumulated_belongs_to_a_step(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    assert run(accumulate, 1, path) == [(1, 0)]
    assert checkpoint.read(path).manifest.step == 2


def validate(dirname: str) -> Any:
    """It is told while it validates; what an epoch ends with is done before it stops."""
    job, done = Job(dirname), []

    def behind_epoch(epoch: int) -> None:
        for number, (_, x) in enumerate(job.valid):
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            job.model(x)
        done.append(epoch)

    with contextlib.suppress(Stopped):
        job.train(behind_epoch=behind_epoch)
    fleet.stop_worker()
    return done


def test_an_evaluation_is_not_cut_in_two(tmp_path: Path) -> None:
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


def test_without_a_sharded_loader_a_job_stops_behind_a_step(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    assert run(feed_itself, 1, path) == [3]
    assert checkpoint.read(path).manifest.step == 4


def save_now_and_then(dirname: str, configs: dict[str, Any]) -> Any:
    """Which steps were saved; behind each one the write is waited for."""
    job, saved = Job(dirname, **configs), []

    def behind(_: int) -> None:
        current().background_save.finish()
        with contextlib.suppress(fleet.errors.CheckpointError):
            saved.append(checkpoint.read(dirname).manifest.step)

    job.train(behind)
    fleet.stop_worker()
    return sorted(set(saved))


def test_it_saves_after_so_many_steps(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    # behind the last batch of an epoch it waits until the next one begins
    assert run(save_now_and_then, 2, path, {"every_steps": 3})[0] == [3, 6, 9]


def test_it_saves_after_some_time(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    saved = run(save_now_and_then, 2, path, {"every_s": 1e-6})[0]
    assert saved[0] == 1
    # the workers ask each other not at every step
    assert len(saved) >= 3


def go_on_saving(dirname: str) -> int:
    job = Job(dirname, resume=True, every_steps=3)
    job.train()
    fleet.stop_worker()
    return checkpoint.read(dirname).manifest.step


def test_it_goes_on_to_save(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run(stop, 1, path, 2)
    # from step 2 on, and step 8 is the last of an epoch
    assert run(go_on_saving, 1, path) == [11]


def end_early(dirname: str) -> None:
    """It dies while it writes what the stop has it save."""
    job = Job(dirname, every_steps=2)

    def behind(steps: int) -> None:
        if steps == 5:
            current().background_save.finish()
            generations.sync_folder_if_supported = lambda path: os._exit(9)
            os.kill(os.getpid(), signal.SIGTERM)

    job.train(behind)


def test_a_job_killed_while_it_stops_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    with pytest.raises(WorkerFailedError, match="died without a word"):
        run(end_early, 1, path)
    saved = checkpoint.read(path)
    saved.verify()
    assert saved.manifest.step == 4
    assert len(run(go_on, 1, path)[0][2]) == EPOCHS * RECORDS - 4 * 6


# --- what may go on


def test_a_checkpoint_is_not_replaced_by_a_job_that_did_not_see_it(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run(stop, 1, path, 2)
    with pytest.raises(
        WorkerFailedError,
        match=r"ckpt holds the checkpoint of an earlier job \(step 2, .*--resume",
    ):
        run(whole, 2, path)
    assert checkpoint.read(path).manifest.step == 2


def test_there_must_be_something_to_go_on_from(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    for _ in range(2):
        with pytest.raises(WorkerFailedError, match=r"ckpt: there is no checkpoint to resume from"):
            run(go_on, 2, str(path))
        # what a first save that was cut short leaves
        path.mkdir(exist_ok=True)


def test_a_newer_checkpoint_is_refused_by_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    run(stop, 1, str(path), 2)
    newer = msgspec.structs.replace(checkpoint.read(path).manifest, version=VERSION + 1)
    (path / "manifest.json").write_bytes(encode(newer))
    text = rf"newer Fleetlight: format version {VERSION + 1}, this one reads up to {VERSION}"
    with pytest.raises(WorkerFailedError, match=text):
        run(go_on, 2, str(path))


def other_model(dirname: str) -> None:
    Job(dirname, resume=True, width=7).train()


def test_another_model_is_told_by_its_first_difference(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run(stop, 1, path, 2)
    text = r"tensor '0\.weight' is float64\[7, 4\] here, but float64\[6, 4\] in the checkpoint"
    with pytest.raises(WorkerFailedError, match=text):
        run(other_model, 2, path)


def start_again(dirname: str) -> Any:
    os.environ["FLEET_RESTART"] = "1"
    job = Job(dirname)
    job.train()
    return job.answer()


def test_a_restart_goes_on_unasked_if_there_is_something(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    assert len(run(start_again, 1, path)[0][2]) == EPOCHS * RECORDS
    run(stop, 1, path, 2)
    assert len(run(start_again, 1, path)[0][2]) == EPOCHS * RECORDS - 2 * 6


# --- the signal


def look_at_handlers(dirname: str | None) -> Any:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    if dirname is None:
        fleet.init(is_collective=True)
        assert signal.getsignal(signal.SIGTERM) is mine
    else:
        Job(dirname)
        os.kill(os.getpid(), signal.SIGTERM)
    fleet.stop_worker()
    assert signal.getsignal(signal.SIGTERM) is mine
    return heard


def test_a_handler_of_the_script_is_called_as_well(tmp_path: Path) -> None:
    assert run(look_at_handlers, 1, str(tmp_path / "ckpt")) == [[signal.SIGTERM]]
    assert run(look_at_handlers, 1, None) == [[]]


def wait(here: Any, for_ever: Any) -> None:
    here.set()
    for_ever.wait()


def end_child(dirname: str) -> Any:
    Job(dirname)
    context = multiprocessing.get_context("fork")
    here, for_ever = context.Event(), context.Event()
    child = context.Process(target=wait, args=(here, for_ever))
    child.start()
    # what comes amid a fork is lost for any handler
    here.wait()
    child.terminate()
    child.join()
    fleet.stop_worker()
    return child.exitcode


def test_children_end_as_they_are_told(tmp_path: Path) -> None:
    assert run(end_child, 1, str(tmp_path / "ckpt")) == [-signal.SIGTERM]


def insist(dirname: str) -> None:
    Job(dirname)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("it should be gone")


def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="died without a word"):
        run(insist, 1, str(tmp_path / "ckpt"))


def never_step(dirname: str) -> None:
    Job(dirname, grace_s=0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def test_who_makes_no_step_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="died without a word"):
        run(never_step, 1, str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()


def waited_for(grace_s: float, *told: int | None) -> Any:
    """Worker 0 has waited for the others; each sign of life brings what server 0 tells next."""
    told_by = iter(told)

    def beat(step: int) -> None:
        client.active_workers = next(told_by, client.active_workers)

    client: Any = SimpleNamespace(heartbeat=beat, active_workers=None, signals=WorkerSignals())
    plan = SimpleNamespace(steps_together=False, serves_dense=True)
    session: Any = SimpleNamespace(is_open=True, bound=SimpleNamespace(plan=plan))
    context: Any = SimpleNamespace(step=7)
    crew: Any = SimpleNamespace(index=0, client=client)
    ServedAgreement(context, session, crew).prepare_stop(grace_s)
    return client.active_workers


@pytest.mark.parametrize(
    ("here", "others"), [(1, None), (3, "2"), (None, "server 0 does not say how many")]
)
def test_who_does_not_leave_in_time_is_told_of(
    here: int | None, others: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that was started again may take long."""
    waited_for(0.01, here)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (others is not None)
    assert all(
        text.startswith(f"saving while other workers still train ({others}): their")
        for text in told
    )


class Left:
    """A worker that waits for one that does not come; `done` is what it does then."""

    def __init__(self, *, lockstep: bool = False, heard: bool = False, stepped: bool = True):
        self.done: list[str] = []
        one: Any = object.__new__(JobAutosave)
        plan = SimpleNamespace(steps_together=lockstep, serves_dense=True)
        signals = SimpleNamespace(received=ControlSignal(stop=heard))
        client = SimpleNamespace(signals=signals)
        session: Any = SimpleNamespace(is_open=True, bound=SimpleNamespace(plan=plan))
        crew: Any = SimpleNamespace(client=client)
        one._agreement = ServedAgreement(SimpleNamespace(), session, crew)  # type: ignore[arg-type]
        one.seen, one.has_stopped, one._has_stepped = False, False, stepped
        one._trained = [
            SimpleNamespace(
                cursor=SimpleNamespace(is_being_read=True, put_back=self.note("put back"))
            )
        ]
        one._stop = self.note("stop")
        self.stopping = one

    def note(self, what: str) -> Callable[[], None]:
        return lambda: self.done.append(what)

    def waits(self, error: type[MembershipError] = StoppedError) -> list[str]:
        self.stopping.peer_missing(error("worker 1 has left"))
        return self.done


def test_who_waits_for_one_that_stops_does_so_too() -> None:
    assert Left().waits() == ["stop"]
    # a batch that was handed out, and is not trained on
    assert Left(stepped=False).waits() == ["put back", "stop"]
    # a server may not know why the other one has left
    assert Left(heard=True).waits(MembershipError) == ["stop"]
    assert Left().waits(MembershipError) == []
    # there all stop together, and meet to save
    assert Left(lockstep=True).waits() == []


def test_who_has_stopped_does_not_save_again() -> None:
    left = Left()
    left.stopping.has_stopped = True
    with pytest.raises(Stopped):
        left.waits()
    assert left.done == []


def test_others_are_waited_for_before_it_is_known_whether_there_are_any() -> None:
    # what a worker was told that was started again a moment ago: nothing yet
    assert waited_for(60, None, 2, 2, 1) == 1
