# SPDX-License-Identifier: Apache-2.0
"""The job object: attached schedulers, hints for other names, and threads of a worker."""

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from tests.ps.gates import Gate
from tests.served import ASYNC, SYNC, Member, geo, run, started
from tests.workers import descend, run_job
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fleetlight as fleet
from fleetlight.checkpoint.formats.values import pack, unpack
from fleetlight.errors import CheckpointError, PlanError
from fleetlight.fleet.hints import HINTS
from fleetlight.fleet.job import Schedulers, current
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.worker.connections import PUSH
from fleetlight.ps.worker.lookahead.prefetcher import Prefetcher
from fleetlight.strategy import DistributedStrategy

Make = Callable[[torch.optim.Optimizer], list[Any]]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.9)


def stepped(made: list[Any], one: torch.optim.Optimizer, steps: int) -> list[float]:
    """The learning rate after each step."""
    rates = []
    for number in range(steps):
        one.step()
        for scheduler in made:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0 + number % 2)
            else:
                scheduler.step()
        rates.append(float(one.param_groups[0]["lr"]))
    return rates


def sequential(one: torch.optim.Optimizer) -> list[Any]:
    parts = [lr_scheduler.LinearLR(one, 0.1, total_iters=3), lr_scheduler.ExponentialLR(one, 0.8)]
    return [lr_scheduler.SequentialLR(one, parts, [3])]


CASES: dict[str, Make] = {
    "steps": lambda o: [lr_scheduler.StepLR(o, 3, 0.5)],
    "milestones": lambda o: [lr_scheduler.MultiStepLR(o, [2, 5, 5, 9])],
    "cosine": lambda o: [lr_scheduler.CosineAnnealingLR(o, 20)],
    "one cycle": lambda o: [lr_scheduler.OneCycleLR(o, 1.0, total_steps=20)],
    "cyclic": lambda o: [lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3)],
    "by a function": lambda o: [lr_scheduler.LambdaLR(o, lambda n: 0.9**n)],
    "plateau": lambda o: [lr_scheduler.ReduceLROnPlateau(o, patience=1)],
    "sequential": sequential,
    "two": lambda o: [lr_scheduler.StepLR(o, 3, 0.5), lr_scheduler.ExponentialLR(o, 0.9)],
}


def attached(*made: Any) -> Schedulers:
    schedulers = Schedulers()
    for one in made:
        schedulers.attach(one)
    return schedulers


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_schedulers_resume(make: Make) -> None:
    first = optimizer()
    made = make(first)
    stepped(made, first, 7)
    states, tensors = attached(*made).states([first]), {}
    saved: Any = unpack(pack(states, "schedulers", tensors), tensors)
    other = optimizer()
    again = make(other)
    other.load_state_dict(first.state_dict())
    attached(*again).load(saved, [other])
    assert stepped(again, other, 9) == stepped(made, first, 9)


def test_only_schedulers_of_the_given_optimizers_are_saved() -> None:
    mine, others = optimizer(), optimizer()
    kept, other = (lr_scheduler.StepLR(one, 3) for one in (mine, others))
    assert attached(kept, other, kept).of([mine]) == [kept]


def test_schedulers_unlike_the_saved_ones_are_an_error() -> None:
    mine, other = optimizer(), optimizer()
    one, two = lr_scheduler.StepLR(mine, 3), lr_scheduler.ExponentialLR(other, 0.9)
    schedulers = attached(one, two)
    with pytest.raises(CheckpointError, match="with the schedulers StepLR, this job has Expon"):
        schedulers.load(schedulers.states([mine]), [other])
    assert (one.last_epoch, two.last_epoch) == (0, 0)


def test_unattached_scheduler_warns_once_and_does_not_resume(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("fleetlight"), "propagate", True)
    mine, plain = optimizer(), optimizer()
    lr_scheduler.StepLR(mine, 3)
    schedulers = Schedulers()
    for _ in range(2):
        schedulers.warn_of_unattached([plain, mine])
    assert caplog.text.count("scheduler of optimizer 1 is not attached") == 1
    assert "optimizer 0" not in caplog.text
    with pytest.raises(CheckpointError, match=r"optimizer 0 is not attached.*fleet\.attach"):
        schedulers.load([], [mine])
    schedulers.load([], [plain])


# Hints for the names of other systems.


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("get_rank", "fleet.worker_index()"),
        ("get_world_size", "fleet.worker_num()"),
        ("broadcast", "fleet.all_gather(value)[0]"),
        ("save", "fleet.save_persistables(dirname)"),
        ("print", "if fleet.is_first_worker(): print"),
    ],
)
def test_error_names_the_replacement(name: str, instead: str) -> None:
    text = re.escape(f"module 'fleetlight' has no attribute {name!r}; use ")
    with pytest.raises(AttributeError, match=f"{text}.*{re.escape(instead)}"):
        getattr(fleet, name)


def test_no_hint_hides_a_public_name() -> None:
    assert not set(HINTS) & {*fleet.__all__, "main_program"}


def test_hints_name_existing_attributes() -> None:
    named = {path for text in HINTS.values() for path in re.findall(r"fleet\.([\w.]*\w)", text)}
    assert len(named) > 20
    for path in named:
        assert attrgetter(path)(fleet), path


# A model that several threads of a worker call while one thread trains.

DIM, IDS, STEPS, READERS = 2, 40, 60, 3
STALE: dict[str, Any] = {"a_sync": True, "a_sync_configs": {"staleness": 2}}
MODES = pytest.mark.parametrize(
    "mode", [SYNC, ASYNC, STALE, geo(3)], ids=["sync", "async", "staleness", "geo"]
)
#: the first half is trained; each reader has its own part of the other half
FIRST = started(IDS, DIM)


class Sum(nn.Module):
    """Its gradient is constant: a row is its first value minus its number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = SparseEmbedding(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.emb(ids)
        return rows


def build() -> Any:
    model = Sum()
    return model, [torch.optim.SGD(model.parameters(), lr=1.0)]


def read(model: nn.Module, reader: int, most: int) -> None:
    """Own rows keep their first values; trained rows show a whole number of steps."""
    own = IDS // 2 + torch.arange(IDS // 2)[reader::READERS]
    ids = torch.cat([torch.arange(IDS // 2), own])
    with torch.no_grad():
        rows = model(ids)
    assert torch.equal(rows[IDS // 2 :], FIRST[own])
    counts = FIRST[: IDS // 2] - rows[: IDS // 2]
    torch.testing.assert_close(counts, counts.round(), atol=1e-3, rtol=0)
    assert -0.5 < float(counts.min()) <= float(counts.max()) < most + 0.5


@contextlib.contextmanager
def readers(model: nn.Module, most: int) -> Iterator[Callable[[], int]]:
    """Threads that read continuously; yields the smallest number of reads."""
    is_over, reads, errors = threading.Event(), [0] * READERS, []

    def read_on(reader: int) -> None:
        try:
            while not is_over.is_set():
                read(model, reader, most)
                reads[reader] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read_on, args=(n,), daemon=True) for n in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: min(reads) if not errors else STEPS
    finally:
        is_over.set()
        for thread in threads:
            thread.join(20)
    if errors:
        raise errors[0]


def train(model: nn.Module, optimizer: Any, ahead: Callable[[Tensor], None], workers: int) -> None:
    """Train while each reader reads."""
    ids = [torch.arange(step % 3, IDS // 2, 3) for step in range(STEPS + 1)]
    with readers(model, STEPS * workers) as reads:
        step = 0
        while step < STEPS or reads() < 5:
            if step < STEPS:
                ahead(ids[step + 1])
                descend(optimizer, model(ids[step]).sum())
                step += 1


def workers_of(mode: dict[str, Any]) -> int:
    """Several GeoSGD workers average, which makes fractional numbers of steps."""
    return 1 if mode == geo(3) else 2


def check(rows: Tensor, workers: int, mode: dict[str, Any]) -> None:
    """Each row has its expected number of steps."""
    # a synchronous step applies the mean gradient
    times = 1 if mode == SYNC else workers
    expected = torch.tensor([len(range(n % 3, STEPS, 3)) for n in range(IDS // 2)]) * float(times)
    counts = FIRST[: IDS // 2] - rows[: IDS // 2]
    torch.testing.assert_close(counts, expected[:, None].expand(-1, DIM), atol=1e-3, rtol=0)


@pytest.mark.slow
@MODES
def test_threads_read_in_memory_while_one_trains(mode: dict[str, Any]) -> None:
    def work(worker: Member) -> Any:
        def ahead(ids: Tensor) -> None:
            worker.communicator.announce([{0: ids.numpy()}])

        train(worker.model, worker.optimizer, ahead, 2)
        worker.barrier()
        return worker.rows(range(IDS))

    workers = workers_of(mode)
    for rows in run(build, work, mode, workers=workers, servers=2):
        check(torch.from_numpy(rows), workers, mode)


def registered(mode: dict[str, Any]) -> Any:
    model, [optimizer] = build()
    model = fleet.distributed_model(model)
    return model, fleet.distributed_optimizer(optimizer, DistributedStrategy(**mode))


def serves(mode: dict[str, Any]) -> None:
    registered(mode)
    fleet.init_server()
    fleet.run_server()


def works(mode: dict[str, Any]) -> Any:
    model, optimizer = registered(mode)
    fleet.init_worker()
    session = current().session
    assert session is not None
    announce = session.communicator.announce
    train(model, optimizer, lambda ids: announce([{0: ids.numpy()}]), 2)
    fleet.barrier_worker()
    with torch.no_grad():
        rows = model(torch.arange(IDS)).numpy()
    fleet.stop_worker()
    return rows


def serve_sync() -> None:
    serves(SYNC)


def work_sync() -> Any:
    return works(SYNC)


def serve_async() -> None:
    serves(ASYNC)


def work_async() -> Any:
    return works(ASYNC)


def serve_geo() -> None:
    serves(geo(3))


def work_geo() -> Any:
    return works(geo(3))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "server", "worker"),
    [
        (SYNC, serve_sync, work_sync),
        (ASYNC, serve_async, work_async),
        (geo(3), serve_geo, work_geo),
    ],
    ids=["sync", "async", "geo"],
)
def test_threads_read_over_sockets_while_one_trains(
    mode: dict[str, Any], server: Any, worker: Any
) -> None:
    workers = workers_of(mode)
    answers = run_job(server, worker, workers=workers)
    assert all(kind == "value" for kind, _ in answers), answers
    for _, rows in answers[2:]:
        check(torch.from_numpy(rows), workers, mode)


def test_step_during_the_step_of_another_thread_is_refused() -> None:
    def work(worker: Member) -> None:
        def step() -> None:
            worker.model(torch.arange(4)).sum().backward()
            worker.optimizer.step()

        step()
        gate = Gate(worker.session.client, PUSH, "send")
        first = threading.Thread(target=step, name="first", daemon=True)
        first.start()
        gate.wait()
        with pytest.raises(PlanError, match="while thread first was inside"):
            worker.optimizer.step()
        gate.open()
        first.join(20)
        assert not first.is_alive()
        # one step after the other is valid
        worker.optimizer.zero_grad()
        step()

    run(build, work, SYNC, workers=1)


def test_prefetched_rows_outdated_by_a_concurrent_step_are_dropped() -> None:
    """Another thread steps between the lookup of the batch and the lookup of its rows."""

    def work(worker: Member) -> None:
        ids = torch.arange(4)
        for _ in range(2):
            worker.communicator.announce([{0: ids.numpy()}])
        prefetcher = worker.communicator.lookahead
        assert isinstance(prefetcher, Prefetcher)
        assert prefetcher._now is not None
        wait = prefetcher._now.pulled.result

        def step_meanwhile(*limit: Any) -> Any:
            found = wait(*limit)
            prefetcher.pushed(0)
            return found

        prefetcher._now.pulled.result = step_meanwhile  # type: ignore[method-assign, assignment]
        assert prefetcher.whole(0, ids.numpy(), 0) is None

    run(build, work, SYNC, workers=1, is_local=False)
