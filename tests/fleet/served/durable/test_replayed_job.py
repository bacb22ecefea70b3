# SPDX-License-Identifier: Apache-2.0
"""Replay in a restarted worker: its script resumes after the step in which it died."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.restartable import (
    BATCH,
    RECORDS,
    Died,
    Own,
    RestartableJob,
    Script,
    in_modes,
    outcome,
    run_with_restart,
    sharded,
    train,
)
from tests.served import Built, Member, loss_of

import fleetlight as fleet
from fleetlight.errors import ConfigError
from fleetlight.fleet.checkpoints import loading
from fleetlight.fleet.served.durable import replayed_job
from fleetlight.fleet.served.session import ServerSession
from fleetlight.ps.worker.replay import worker_journal as journal_module

# -- state that only the worker has ---------------------------------------------------------------


@in_modes
@pytest.mark.parametrize("large", [0, 1 << 16])
@pytest.mark.parametrize(
    "dies", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(9, marks=pytest.mark.slow)]
)
def test_replay_restores_frozen_parameters_changed_by_the_script(
    new_job: Callable[..., RestartableJob],
    mode: str,
    dies: int,
    large: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replayed_job, "_LARGE", large)
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
    message = rf"restarted alone, but cannot resume at the step where it died: .*{why}"
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
