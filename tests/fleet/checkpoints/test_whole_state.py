# SPDX-License-Identifier: Apache-2.0
"""The state that a job saves and resumes from, and when its workers agree to stop."""

import copy
import dataclasses
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.served import ASYNC, SYNC, Member, geo, run
from tests.workers import run_workers
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.errors import CheckpointError, PlanError
from fleetlight.fleet import job as jobs
from fleetlight.fleet.checkpoints import whole_state, worker_state
from fleetlight.fleet.checkpoints.resumption import _found
from fleetlight.fleet.checkpoints.stop_agreement import MAX_PLACES, POLL_EVERY_S, PollSchedule
from fleetlight.fleet.checkpoints.worker_state import PARTS, saved_values
from fleetlight.fleet.protocols import Purpose, SavedPart
from fleetlight.fleet.training import registering
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.roles.role import Role
from fleetlight.strategy import DistributedStrategy

IDS, OTHERS = torch.tensor([[1, 2], [2, 7]]), torch.tensor([[3, 2], [8, 1]])


class Net(nn.Module):
    """An open table, a moved one, dense parameters, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.open = SparseEmbedding(3, table="users")
        self.moved = nn.Embedding(9, 3, sparse=True)
        self.dense = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += self.training
        return torch.sigmoid(self.dense(self.open(ids).sum(1) + self.moved(ids).sum(1))).sum()


def built() -> Any:
    model = Net()
    return model, [torch.optim.Adagrad(model.parameters(), lr=0.5)]


def train(member: Member, ids: Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        member.model.train()((ids + member.index) % 9).backward()
        member.optimizer.step()
        member.optimizer.zero_grad()


def taken(member: Member, **options: Any) -> dict[str, Any]:
    return whole_state._state_dict(member.context, member.model, **options)


def put(member: Member, state: dict[str, Any]) -> None:
    whole_state._load_state_dict(member.context, member.model, state)


def output(member: Member) -> Tensor:
    with torch.no_grad():
        return member.model.eval()(torch.tensor([[0, 1], [2, 3], [7, 8]]))


@pytest.mark.parametrize("mode", [SYNC, ASYNC, geo(2), {"a_sync_configs": {"dense": "servers"}}])
@pytest.mark.parametrize("workers", [1, 2])
def test_best_values_are_kept_and_restored(mode: Any, workers: int) -> None:
    def work(member: Member) -> Any:
        train(member, IDS)
        member.barrier()
        before = output(member)
        best = taken(member)
        train(member, OTHERS, 3)
        member.barrier()
        assert output(member) != before
        put(member, best)
        after = output(member)
        assert after == before
        # no worker trains before all have read the rows
        member.barrier()
        train(member, IDS)
        return sorted(best), after

    answers = run(built, work, mode, workers=workers, servers=2)
    names = ["dense.bias", "dense.weight", "frozen", "moved.weight", "seen"]
    assert answers[0][0] == [*names, "users.ids", "users.weight"]
    for others, after in answers[1:]:
        assert others == []
        assert after == answers[0][1]


def test_state_has_the_values_of_the_servers() -> None:
    def work(member: Member) -> None:
        train(member, IDS)
        state = taken(member)
        assert state["users.ids"].tolist() == [1, 2, 7]
        np.testing.assert_array_equal(state["users.weight"].numpy(), member.rows([1, 2, 7], 0))
        np.testing.assert_array_equal(state["moved.weight"].numpy(), member.rows(range(9), 1))
        torch.testing.assert_close(state["dense.weight"], member.model.dense.weight.detach())

    run(built, work, SYNC, workers=1, servers=2)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_load_leaves_the_optimizers_unchanged() -> None:
    """As with `load_state_dict` of plain PyTorch, optimizer state stays."""

    def ours(member: Member) -> Any:
        train(member, IDS)
        best = taken(member)
        train(member, IDS)
        put(member, best)
        train(member, IDS)
        return member.rows(range(9), 1), member.model.dense.weight.detach().clone()

    def plain() -> Any:
        torch.manual_seed(0)
        model: Any = Net()
        model.open.forward = lambda ids: torch.zeros(*ids.shape, 3)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)

        def go() -> None:
            for _ in range(2):
                model(IDS).backward()
                optimizer.step()
                optimizer.zero_grad()

        go()
        best = copy.deepcopy(model.state_dict())
        go()
        model.load_state_dict(best)
        go()
        return model.moved.weight.detach().numpy(), model.dense.weight.detach()

    def without_open() -> Any:
        model, optimizers = built()
        model.open.requires_grad_(False)
        model.open.forward = lambda ids: torch.zeros(*ids.shape, 3)
        return model, optimizers

    [(rows, dense)] = run(without_open, ours, SYNC, workers=1, servers=2)
    expected_rows, expected_dense = plain()
    np.testing.assert_allclose(rows, expected_rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dense, expected_dense)


def test_oversized_or_unfit_state_changes_nothing() -> None:
    def work(member: Member) -> None:
        train(member, IDS)
        before, state = output(member), taken(member)
        with pytest.raises(CheckpointError, match=r"more than max_bytes=100.*save_persistables"):
            taken(member, max_bytes=100)
        for broken, words in (
            ({**state, "users.weight": state["users.weight"][:1]}, "table 'users' has"),
            ({k: v for k, v in state.items() if k != "users.ids"}, "no rows of table 'users'"),
            ({k: v for k, v in state.items() if k != "dense.bias"}, "dense.bias"),
            ({**state, "other": torch.ones(1)}, "other"),
            ({}, "an empty state"),
        ):
            with pytest.raises(CheckpointError, match=words):
                put(member, broken)
        assert output(member) == before

    run(built, work, SYNC, workers=1, servers=2)


def test_state_dict_of_the_model_warns_that_it_has_no_rows(caplog: Any) -> None:
    def work(member: Member) -> None:
        train(member, IDS)
        state = member.model.state_dict()
        member.model.state_dict()
        taken(member)
        torch.save(member.model, io.BytesIO())
        copy.deepcopy(member.model)
        for entries in (state, {"moved.weight": torch.zeros(9, 3)}):
            with pytest.raises(PlanError, match=r"fleet\.load_state_dict\(model, state\)"):
                member.model.load_state_dict(entries, strict=False)
        with pytest.raises(PlanError, match="table moved"):
            member.model.moved.load_state_dict({"weight": torch.zeros(9, 3)})

    run(built, work, SYNC, workers=1)
    warnings = [
        r.getMessage() for r in caplog.records if "state_dict() has no rows" in r.getMessage()
    ]
    assert len(warnings) == 1
    assert "fleet.save_persistables" in warnings[0]
    assert "fleetlight export" in warnings[0]


class Counted(Net):
    """A module with values that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.best: Any = None

    def get_extra_state(self) -> Any:
        return {"best": self.best}

    def set_extra_state(self, state: Any) -> None:
        self.best = state["best"]


def built_counted() -> Any:
    model = Counted()
    return model, [torch.optim.Adagrad(model.parameters(), lr=0.5)]


@pytest.mark.parametrize("best", [5, (0.5, torch.arange(3.0))])
def test_extra_state_reaches_all_workers(best: Any) -> None:
    def work(member: Member) -> None:
        model: Any = member.model
        train(member, IDS)
        model.best = best if member.index == 0 else "mine"
        state = taken(member)
        model.best = "later"
        before = model.dense.weight.detach().clone()
        put(member, state)
        torch.testing.assert_close(model.best, best)
        torch.testing.assert_close(model.dense.weight.detach(), before)
        train(member, IDS)

    run(built_counted, work, SYNC, workers=2)


def test_extra_state_that_cannot_be_sent_changes_nothing() -> None:
    def work(member: Member) -> None:
        model: Any = member.model
        train(member, IDS)
        state = taken(member)
        if member.index == 0:
            state["_extra_state"] = {"best": object()}
        model.best = 3
        before = output(member)
        with pytest.raises(CheckpointError, match="got a object, expected tensors, numbers"):
            put(member, state)
        assert model.best == 3
        assert output(member) == before

    run(built_counted, work, SYNC, workers=2)


def test_pickled_model_warns_that_it_has_no_rows(caplog: Any) -> None:
    def work(member: Member) -> bytes:
        train(member, IDS)
        file = io.BytesIO()
        torch.save(member.model, file)
        torch.save(member.model, io.BytesIO())
        copy.deepcopy(member.model)
        return file.getvalue()

    [saved] = run(built, work, SYNC, workers=1)
    warnings = [r.getMessage() for r in caplog.records if "torch.save(model)" in r.getMessage()]
    assert len(warnings) == 1
    assert "fleet.save_persistables" in warnings[0]
    model: Any = pickle.loads(pickle.dumps(torch.load(io.BytesIO(saved), weights_only=False)))
    for layer, name in ((model.moved, "moved"), (model.open, "users")):
        words = rf"rows of table {name} stayed .*fleet\.load_state_dict\(model, state\)"
        with pytest.raises(PlanError, match=words):
            layer(IDS)
    with pytest.raises(PlanError, match="rows of table moved stayed"):
        registering._refuse_model_of_earlier_job(model)


def test_load_of_a_state_without_rows_warns_before_the_next_job(caplog: Any) -> None:
    def work(member: Member) -> bytes:
        train(member, IDS)
        file = io.BytesIO()
        torch.save({n: v for n, v in member.model.state_dict().items() if "moved" not in n}, file)
        # no warning for a state that fleet loads in a job
        put(member, taken(member))
        return file.getvalue()

    [saved] = run(built, work, SYNC, workers=1)
    state = torch.load(io.BytesIO(saved))
    for _ in range(2):
        fresh = Net()
        fresh.load_state_dict(fresh.state_dict())
        fresh.load_state_dict(state, strict=False)
    warnings = [
        r.getMessage() for r in caplog.records if "load_state_dict: the st" in r.getMessage()
    ]
    assert len(warnings) == 1
    assert "table users" in warnings[0]
    assert "fleet.load_persistables" in warnings[0]


def _keep_best() -> bool:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    def step() -> None:
        torch.manual_seed(fleet.worker_index())
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    best = fleet.state_dict(model)
    assert bool(best) == fleet.is_first_worker()
    expected = fleet.all_reduce(model[0].weight.detach().clone()) / fleet.worker_num()
    step()
    fleet.load_state_dict(model, best)
    mean = fleet.all_reduce(model[1].running_mean.clone()) / fleet.worker_num()
    torch.testing.assert_close(mean, model[1].running_mean)
    return torch.allclose(model[0].weight.detach(), expected)


@pytest.mark.slow
def test_state_of_workers_without_servers() -> None:
    assert run_workers(_keep_best) == [True, True]


def _load_extra() -> Any:
    model: Any = Counted()
    del model.open, model.moved
    fleet.distributed_model(model)
    model.best = fleet.worker_index()
    state = fleet.state_dict(model)
    model.best = "later"
    fleet.load_state_dict(model, state)
    return model.best


@pytest.mark.multiprocess
def test_extra_state_reaches_workers_without_servers() -> None:
    assert run_workers(_load_extra) == [0, 0]


# One list of parts saves, loads and replays a worker's state.


@dataclasses.dataclass
class Toy:
    """A new part: one class, and its place in the list."""

    context: jobs.Job
    name: ClassVar[str] = "toy"
    purposes: ClassVar[tuple[Purpose, ...]] = tuple(Purpose)
    value: ClassVar[Any] = None
    loaded: ClassVar[list[SavedPart]] = []

    def save(self) -> Any:
        return self.value

    def load(self, saved: SavedPart) -> None:
        self.loaded.append(saved)


def with_toy(folder: str) -> tuple[str, int, list[int], list[int]]:
    worker_state.PARTS = (*PARTS, Toy)
    mine = fleet.worker_index()
    Toy.value = {"count": 3 + mine, "kept": torch.arange(2) + mine}
    fleet.distributed_model(torch.nn.Linear(2, 1))
    fleet.save_persistables(folder)
    fleet.load_persistables(folder)
    [saved] = Toy.loaded
    counts = [value["count"] for value in saved.each]
    return saved.purpose.name, saved.first["count"], counts, saved.own["kept"].tolist()


@pytest.mark.multiprocess
def test_a_new_part_is_saved_and_loaded(tmp_path: Path) -> None:
    zero, one = run_workers(with_toy, 2, str(tmp_path))
    assert zero == ("CHECKPOINT", 3, [3, 4], [0, 1])
    assert one == ("CHECKPOINT", 3, [3, 4], [1, 2])


def test_part_without_state_is_not_in_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_state, "PARTS", (Toy,))
    monkeypatch.setattr(Toy, "value", None)
    assert saved_values(None, Purpose.REPLAY) == {}  # type: ignore[arg-type]
    monkeypatch.setattr(Toy, "value", 0)
    assert saved_values(None, Purpose.REPLAY) == {"toy": 0}  # type: ignore[arg-type]


@pytest.mark.parametrize("purpose", Purpose)
def test_parts_have_distinct_names(purpose: Purpose) -> None:
    names = [part.name for part in PARTS if purpose in part.purposes]  # type: ignore[attr-defined]
    assert len(names) == len(set(names))


# The poll schedule: at which places workers poll each other for a stop.


def polled_places(places: int, seconds_of: Callable[[int], float]) -> tuple[list[int], list[float]]:
    """The places at which workers poll, and the seconds between polls."""
    schedule, polled, lengths, passed_s = PollSchedule(), [], [], 0.0
    for place in range(1, places + 1):
        passed_s += seconds_of(place)
        if schedule.advance():
            schedule.record_poll(passed_s)
            polled.append(place)
            lengths.append(passed_s)
            passed_s = 0.0
    return polled, lengths


def test_slow_steps_all_poll() -> None:
    assert polled_places(5, lambda _: 3.0)[0] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step_s", [0.2, 0.02, 0.005])
def test_polls_come_about_twice_a_second(step_s: float) -> None:
    polled, lengths = polled_places(1000, lambda _: step_s)
    assert polled[:2] == [1, 3 if step_s < 0.2 else polled[1]]
    settled = lengths[8:]
    assert settled
    assert all(POLL_EVERY_S - step_s <= length <= POLL_EVERY_S + step_s for length in settled)


def test_polls_are_at_most_max_places_apart() -> None:
    polled, _ = polled_places(2000, lambda _: 1e-5)
    assert max(after - before for before, after in itertools.pairwise(polled)) == MAX_PLACES


def test_polls_follow_steps_that_become_slow() -> None:
    polled, _ = polled_places(400, lambda place: 0.005 if place < 200 else 2.0)
    slow = [place for place in polled if place >= 200]
    assert slow[0] <= 200 + MAX_PLACES
    assert slow[1:] == list(range(slow[1], 401))


def test_workers_with_equal_times_poll_at_the_same_places() -> None:
    schedules = [PollSchedule() for _ in range(3)]
    for place in range(300):
        arrived = {schedule.advance() for schedule in schedules}
        assert len(arrived) == 1
        if arrived == {True}:
            for schedule in schedules:
                schedule.record_poll(0.001 * (1 + place % 7))


# Which jobs resume from the checkpoint in their folder.


def job(role: Role, **configs: Any) -> Any:
    strategy = DistributedStrategy(checkpoint_configs=configs)
    return SimpleNamespace(role=role, strategy=strategy, is_untrained=False)


def test_job_that_may_begin_does_so_without_a_checkpoint(tmp_path: Path) -> None:
    assert _found(job(Role(resume=True, may_begin=True)), str(tmp_path)) is None


@pytest.mark.parametrize(
    ("role", "configs"),
    [(Role(resume=True), {}), (Role(resume=True, may_begin=True), {"resume": True})],
)
def test_job_that_must_resume_does_not_begin(
    role: Role, configs: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint to resume from"):
        _found(job(role, **configs), str(tmp_path))
