# SPDX-License-Identifier: Apache-2.0
"""`fleet.run_steps` equals a loop, and announces the ids of plain loaders."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.served import SYNC, Member, Net, geo, run
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fleetlight.data.loader import ShardLoader
from fleetlight.errors import ConfigError
from fleetlight.fleet.public import stepping
from fleetlight.fleet.public.sharding import JobObserver

IDS = torch.arange(48).view(16, 3)


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "current", lambda: _job_of[0])


_job_of: list[Any] = []


def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Net()
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)]


def loader() -> DataLoader[Tensor]:
    return DataLoader(list(IDS), batch_size=2)  # type: ignore[arg-type]


def step_of(worker: Member) -> Any:
    def step(ids: Tensor) -> Tensor:
        worker.optimizer.zero_grad()
        loss = worker.model(ids).square().mean()
        loss.backward()
        worker.optimizer.step()
        return loss.detach()

    return step


def by_loop(worker: Member) -> Any:
    step = step_of(worker)
    return [step(ids) for ids in loader()][-1], 8, worker.rows(range(48))


def by_calls(worker: Member, steps: int | None) -> Any:
    _job_of[:] = [worker.context]
    step, made = step_of(worker), 0
    batches: Any = loader() if steps is None else iter(loader())
    while True:
        done = stepping.run_steps(step, batches, steps)
        if not done.steps:
            assert done.result is None
            break
        loss, made = done.result, made + done.steps
        if steps is None:
            break
    metrics = worker.communicator.metrics()
    return (loss, made, worker.rows(range(48))), metrics.get("rows_read_ahead", 0)


@pytest.mark.parametrize(("steps", "prefetched"), [(None, 36), (3, 24), (1, 0)])
def test_calls_equal_a_loop_and_rows_are_prefetched(steps: int | None, prefetched: int) -> None:
    # the first batch teaches where ids are, and the second was read before
    [expected] = run(build, by_loop, workers=1)
    [(found, ahead)] = run(build, functools.partial(by_calls, steps=steps), workers=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert ahead == prefetched


def test_geo_reads_no_batch_ahead() -> None:
    [(_, ahead)] = run(build, functools.partial(by_calls, steps=4), geo(2), workers=1)
    assert ahead == 0


def test_a_sharded_loader_is_not_read_ahead() -> None:
    """Also behind a generator: it counts what it hands out."""

    def train(worker: Member) -> Any:
        _job_of[:] = [worker.context]
        job = worker.context
        sharded: ShardLoader[Any] = ShardLoader(
            loader(), worker=0, workers=1, seed=0, tail="join", observer=JobObserver(job, False)
        )
        job.loaders.append(sharded)
        seen: list[int] = []
        step = step_of(worker)

        def counted(ids: Tensor) -> None:
            step(ids)
            seen.append(sharded.consumed)

        batches = (batch for batch in sharded)
        return [stepping.run_steps(counted, batches, 5).steps for _ in range(2)], seen

    [(made, seen)] = run(build, train, SYNC, workers=1)
    assert made == [5, 3]
    assert seen == list(range(2, 17, 2))


def test_an_error_belongs_to_its_batch() -> None:
    def failing() -> Iterator[Tensor]:
        yield from (IDS[:2], IDS[2:4])
        raise OSError("unreadable")

    def train(worker: Member) -> int:
        _job_of[:] = [worker.context]
        with pytest.raises(OSError, match="unreadable"):
            stepping.run_steps(step_of(worker), failing())
        return worker.context.step

    assert run(build, train, workers=1) == [2]


@pytest.mark.parametrize(
    ("batches", "steps", "error"),
    [
        ([1, 2], 2, r"run_steps: got steps=2 and a list, expected an iterator"),
        (iter([1]), 0, r"run_steps: got steps=0, expected a number of steps, or None"),
    ],
)
def test_wrong_arguments_are_refused(batches: Any, steps: int, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        stepping._limited(batches, steps)
