# SPDX-License-Identifier: Apache-2.0
"""Several steps of a program in one call equal as many calls, with parameter servers."""

import functools
from typing import Any

import pytest
import torch
from tests.fleet.served.test_programs import (
    IDS,
    TARGETS,
    Program,
    Shared,
    capture,
    eagerly,
    final_state,
    made,
)
from tests.served import ASYNC, SYNC, Member, Net, geo, run
from tests.workers import run_job
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.fleet.served.durable.replayed_job import ReplayedSteps
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.worker.client import Client

pytestmark = pytest.mark.slow

MERGED = {"a_sync": False, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}


def feeds(worker: Member, *, disjoint: bool = False) -> list[dict[str, Tensor]]:
    """With disjoint ids, the rows of a batch are equal whenever they are read."""
    shift = [1000 * step if disjoint else 0 for step in range(len(IDS))]
    return [
        {"ids": IDS[step, worker.index] + shift[step], "target": TARGETS[step, worker.index]}
        for step in range(len(IDS))
    ]


def train(worker: Member, steps: int | None, *, disjoint: bool, started: bool = False) -> Any:
    program, exe = capture(worker), static.Executor()
    given = feeds(worker, disjoint=disjoint)
    if steps is None:
        for feed in given:
            losses = exe.run(program, feed, ["loss"])
        return final_state(worker, losses)
    reader = static.bind([tuple(feed.values()) for feed in given], program=program)
    if started:
        reader.start()
    for at in range(0, len(given), steps):
        feed = None if started else given[at : at + steps]
        losses = exe.run(program, feed, ["loss"], steps=steps)
    return final_state(worker, losses)


@pytest.mark.parametrize(
    ("kind", "strategy", "workers"),
    [
        (Shared, MERGED, 2),
        (Net, SYNC, 2),
        (Shared, SYNC, 2),
        (Net, ASYNC, 1),
        (Net, geo(4), 1),
        (Shared, geo(4), 1),
        (Net, MERGED, 2),
    ],
)
def test_steps_equal_single_runs_bit_for_bit(
    kind: Any, strategy: dict[str, Any], workers: int
) -> None:
    # an async worker has the rows of later batches before its pushes of earlier ones
    disjoint = strategy is ASYNC
    make = made(kind, torch.optim.SGD, lr=0.05)
    [expected, one, other] = [
        run(make, functools.partial(train, disjoint=disjoint, **how), strategy, workers=workers)
        for how in ({"steps": None}, {"steps": 4}, {"steps": 4, "started": True})
    ]
    torch.testing.assert_close(one, expected, rtol=0, atol=0)
    torch.testing.assert_close(other, expected, rtol=0, atol=0)


def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pulls and pushes of all workers from now on."""
    calls: list[str] = []
    pull = Client.pull

    def counted(self: Client, *args: Any, **more: Any) -> Any:
        calls.append("pull")
        return pull(self, *args, **more)

    monkeypatch.setattr(Client, "pull", counted)
    return calls


def test_a_step_pulls_all_tables_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = requests(monkeypatch)

    def single(worker: Member) -> None:
        program, exe = capture(worker), static.Executor()
        calls.clear()
        for feed in feeds(worker):
            exe.run(program, feed)
        assert len(worker.session.bound.plan.tables) == 2
        assert len(calls) == len(IDS)

    run(made(Shared), single, workers=1)


@pytest.mark.parametrize(("strategy", "missed"), [(SYNC, 1), (ASYNC, 2)])
@pytest.mark.parametrize("started", [True, False])
def test_rows_come_with_pushes(
    strategy: Any, missed: int, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the first batch of the next call, where a started loader knows it."""
    calls = requests(monkeypatch)

    def several(worker: Member) -> int:
        program, exe = capture(worker), static.Executor()
        reader = static.bind([tuple(f.values()) for f in feeds(worker)], program=program)
        reader.start()
        calls.clear()
        for at in (0, 3):
            feed = None if started else feeds(worker)[at : at + 3]
            exe.run(program, feed, steps=3)
        return len(calls)

    assert run(made(Net), several, strategy, workers=1) == [missed * (1 if started else 2)]


def test_a_single_run_between_withdraws_what_was_announced() -> None:
    def mixed(worker: Member, steps: int | None) -> Any:
        program, exe = capture(worker), static.Executor()
        given = feeds(worker)
        reader = static.bind([tuple(f.values()) for f in given], program=program)
        reader.start()
        exe.run(program, steps=2) if steps else [exe.run(program) for _ in range(2)]
        exe.run(program, given[0])
        losses = (
            exe.run(program, fetch_list=["loss"], steps=2)
            if steps
            else [exe.run(program, fetch_list=["loss"]) for _ in range(2)][-1]
        )
        return final_state(worker, losses)

    found, expected = (run(made(Net), functools.partial(mixed, steps=steps)) for steps in (2, None))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_whatever_watches_steps_sees_every_one() -> None:
    def watched(worker: Member) -> Any:
        program, exe = capture(worker), static.Executor()
        [steps] = worker.context.steps
        exe.run(program, feeds(worker), steps=1)
        before = steps.needs_torch
        scheduler = torch.optim.lr_scheduler.ExponentialLR(worker.optimizer, 0.5)
        with_scheduler = steps.needs_torch
        exe.run(program, feeds(worker), steps=2)
        scheduler.step()
        seen: list[int] = []
        hook = worker.optimizer.register_step_post_hook(lambda *_: seen.append(1))
        exe.run(program, feeds(worker), steps=3)
        hook.remove()
        own = worker.optimizer.step
        worker.optimizer.step = lambda *args: (seen.append(2), own(*args))[1]  # type: ignore
        exe.run(program, feeds(worker), steps=1)
        return before, with_scheduler, seen, worker.context.step

    assert run(made(Net), watched, workers=1) == [(False, False, [1, 1, 1, 2], 7)]


def test_a_learning_rate_set_between_calls_is_used() -> None:
    def halved(worker: Member, steps: int | None) -> Any:
        program, exe = capture(worker), static.Executor()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(worker.optimizer, 0.5)
        for at in (0, 3):
            given = feeds(worker)[at : at + 3]
            if steps:
                losses = exe.run(program, given, ["loss"], steps=steps)
            for feed in () if steps else given:
                losses = exe.run(program, feed, ["loss"])
            scheduler.step()
        return final_state(worker, losses)

    found, expected = (
        run(made(Net, torch.optim.SGD), functools.partial(halved, steps=steps))
        for steps in (3, None)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_attached_scaler_and_a_journal_need_the_step_of_torch() -> None:
    def train(worker: Member) -> tuple[bool, bool, bool]:
        [steps] = worker.context.steps
        before = steps.needs_torch
        # as GradScaler.step sets it
        worker.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        return before, steps.needs_torch, ReplayedSteps.needs_torch.fget(steps)  # type: ignore[attr-defined]

    assert run(made(Net), train, workers=1) == [(False, True, True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "needed"), [(ASYNC, True), (SYNC, False), (geo(2), True)])
def test_dense_parameters_that_a_worker_steps_need_the_step_of_torch(
    strategy: Any, needed: bool
) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = SparseEmbedding(4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.emb(ids).sum((1, 2))[:, None]
            return out

    def train(worker: Member) -> bool:
        [steps] = worker.context.steps
        return steps.needs_torch

    assert run(made(Net), train, strategy, workers=1) == [needed]
    assert run(made(Rows), train, strategy, workers=1) == [False]


def test_a_job_may_save_after_each_step() -> None:
    class Stepped:
        made = 0

        def resume(self) -> None:
            pass

        def step_made(self) -> None:
            self.made += 1
            if self.made == 2:
                raise KeyboardInterrupt

    def train(worker: Member) -> tuple[int, int]:
        program, exe = capture(worker), static.Executor()
        worker.context.autosave = Stepped()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            exe.run(program, feeds(worker), steps=4)
        return worker.context.autosave.made, worker.context.step  # type: ignore[union-attr]

    assert run(made(Net), train, workers=1) == [(2, 2)]


class Calls(Program):
    """A process of a job with real connections that makes three steps a call."""

    def train(self, exe: static.Executor, loss: Any, evaluation: static.Program) -> Any:
        main, mine = static.default_main_program(), fleet.worker_index()
        given = list(zip(IDS[:, mine], TARGETS[:, mine], strict=True))
        static.bind(given, ["ids", "target"], main).start()
        for _ in range(2):
            [last] = exe.run(main, fetch_list=[loss], steps=3)
        fleet.barrier_worker()
        return last, exe.run(evaluation, {"ids": IDS[0, 0], "target": TARGETS[0, 0]}, [loss])[0]


def test_processes_make_several_steps_a_call(tmp_path: Any) -> None:
    script = Calls(SYNC, str(tmp_path / "checkpoint"))
    answers = run_job(script, script)
    assert [kind for kind, _ in answers] == ["value"] * 4, answers
    expected = run(made(Shared, torch.optim.SGD, lr=0.05), eagerly)
    for (_, found), wanted in zip(answers[2:], expected, strict=True):
        torch.testing.assert_close(found[0], wanted[0][-1], rtol=1e-5, atol=1e-6)
