# SPDX-License-Identifier: Apache-2.0
"""Replay in a restarted worker: its script resumes after the step in which it died."""

import os
from collections.abc import Callable, Iterator
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
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import fleetlight as fleet
from fleetlight.errors import ConfigError
from fleetlight.fleet.checkpoints import loading
from fleetlight.fleet.served.durable import replayed_job
from fleetlight.fleet.served.elastic.unserved_tensors import UnservedTensors
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


# Replay of loaders: a restarted worker resumes at the positions where its script died.


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
@pytest.mark.parametrize("dies", [6, 1, 2, 3, 5, 7, 10, 13])
def test_replay_restores_the_positions_of_all_loaders(
    new_job: Callable[..., RestartableJob], script: Callable[[Script], None], dies: int
) -> None:
    assert run_with_restart(new_job(), script, dies) == run_with_restart(new_job(), script)


def test_repeated_batch_has_the_epoch_and_the_position_of_the_first_time(
    new_job: Callable[..., RestartableJob],
) -> None:
    """As the page on reliability counts the records that a script has logged."""
    lines: list[tuple[int, int, list[int]]] = []

    def logs(script: Script) -> None:
        loader = sharded()
        for epoch in range(loader.epoch, 2):
            for (ids,) in loader:
                script.step(ids)
                lines.append((epoch, loader.consumed, ids.flatten().tolist()))
                if script.incarnation == 1 and len(lines) == 8:
                    raise Died

    run_with_restart(new_job(), logs, dies=10**6)
    assert len(lines) == 2 * RECORDS // BATCH + 1
    assert lines[7] == lines[8]
    batches = {(epoch, consumed): ids for epoch, consumed, ids in lines}
    for epoch in range(2):
        ids = [one for (of, _), own in batches.items() if of == epoch for one in own]
        assert sorted(ids) == list(range(RECORDS))


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


# The tensors of a model that no server keeps, also after a script replaces some.


def made() -> nn.Sequential:
    """A model whose linear layer is on the servers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.PReLU()))
    for parameter in model[1].parameters():
        parameter.requires_grad = False
    return model


OWN = {
    *("0.1.weight", "0.1.bias", "0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked"),
    "0.2.0.weight",
}


def of(own: UnservedTensors, model: nn.Module) -> dict[str, torch.Tensor]:
    return own.tensors([model], list(model[0].parameters()))  # type: ignore[index]


def test_served_tensors_are_excluded() -> None:
    assert of(UnservedTensors(), made()).keys() == OWN


def test_values_are_current() -> None:
    own, model = UnservedTensors(), made()
    of(own, model)
    model(torch.randn(4, 2))
    model[1].weight.data = torch.full((2,), 7.0)
    found = of(own, model)
    assert found["0.1.num_batches_tracked"] == 1
    assert found["0.1.weight"].tolist() == [7, 7]
    assert not any(tensor.requires_grad for tensor in found.values())


def replace_a_buffer(model: nn.Sequential) -> set[str]:
    model[1].running_mean = torch.full((2,), 7.0)
    return OWN


def replace_a_parameter(model: nn.Sequential) -> set[str]:
    model[2][0].weight = nn.Parameter(torch.full((1,), 7.0))  # type: ignore[index]
    return OWN


def replace_a_module(model: nn.Sequential) -> set[str]:
    model[2][0] = nn.Linear(1, 1)  # type: ignore[operator]
    nn.init.constant_(model[2][0].weight, 7.0)  # type: ignore[index, arg-type]
    return OWN | {"0.2.0.bias"}


def add_a_buffer(model: nn.Sequential) -> set[str]:
    model[2].register_buffer("seen", torch.full((2,), 7.0))
    return OWN | {"0.2.seen"}


def add_a_module(model: nn.Sequential) -> set[str]:
    model[2].append(nn.PReLU(init=7.0))  # type: ignore[operator]
    return OWN | {"0.2.1.weight"}


def empty_a_buffer(model: nn.Sequential) -> set[str]:
    model[1].running_mean.data = torch.empty(0)
    model[1].running_var.fill_(7.0)
    return OWN - {"0.1.running_mean"}


@pytest.mark.parametrize(
    "change",
    [
        *(replace_a_buffer, replace_a_parameter, replace_a_module),
        *(add_a_buffer, add_a_module, empty_a_buffer),
    ],
)
def test_changes_by_a_script_are_found(change: Callable[[nn.Sequential], set[str]]) -> None:
    own, model = UnservedTensors(), made()
    before = of(own, model)
    assert not any(bool((tensor == 7.0).any()) for tensor in before.values())
    expected = change(model)
    now = of(own, model)
    assert now.keys() == expected
    assert any(bool((tensor == 7.0).any()) for tensor in now.values())


def test_another_model_and_other_served_parameters_are_found() -> None:
    own, model = UnservedTensors(), made()
    of(own, model)
    assert of(own, made()).keys() == OWN
    both = own.tensors([model, made()], list(model[0].parameters()))
    assert both.keys() >= {"0.1.weight", "1.0.weight", "1.1.weight"}
    assert own.tensors([model], list(model.parameters())).keys() == {
        name for name in OWN if "running" in name or "tracked" in name
    }
