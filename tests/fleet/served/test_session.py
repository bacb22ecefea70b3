# SPDX-License-Identifier: Apache-2.0
"""The session of a worker: agreement on the plan, first values, barriers and the end."""

import dataclasses
import os
import signal
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.served import ASYNC, SYNC, Job, Member, Net, geo, run
from torch import nn

from fleetlight.errors import GradientError, PeerLostError, PlanError
from fleetlight.fleet.plan.bound_plan import bound_plan_of
from fleetlight.fleet.served.stop_agreement import WorkerDeparture, WorkerLeaves
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.roles import Role

ONE = torch.tensor([[1, 2, 3]])


def build() -> Any:
    model = Net()
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)]


def test_first_values_are_those_of_worker_0() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(50, 3, sparse=True)
            self.linear = nn.Linear(3, 1)

    made = []

    def differing() -> Any:
        model = Moved()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(len(made))
        made.append(model)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    job = Job(differing, SYNC, workers=2, servers=2)
    members = [job.member(index) for index in (0, 1)]
    first = float(members[0].model.linear.bias.detach())  # type: ignore[arg-type,operator,union-attr]
    assert first == 2  # built after those of the servers

    def work(worker: Member) -> Any:
        return worker.rows(range(50)), worker.model.linear.weight.detach().clone()  # type: ignore[operator,union-attr]

    job.member = lambda index: members[index]  # type: ignore[method-assign]
    for rows, weight in job.run(work):
        assert (rows == first).all()
        assert (weight == first).all()


def test_error_names_the_difference_between_scripts() -> None:
    job = Job(build, SYNC, workers=1, servers=1)
    job.build = lambda: (m := Net(dim=5), [torch.optim.SGD(m.parameters(), lr=0.1)])
    [error] = job.tried(lambda worker: None)
    assert isinstance(error, PlanError)
    assert "plan.tables[emb].dim: 4 here, 5 there; run the same script" in str(error)

    def more() -> Any:
        model = nn.Sequential(SparseEmbedding(4))
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    job = Job(build, SYNC, workers=1, servers=1)
    job.build = more
    [error] = job.tried(lambda worker: None)
    assert "plan.tables[emb]: 'present' here, 'absent' there" in str(error)
    assert "server 0 (here) and worker 0" in str(error)


def test_unregistered_model_is_refused() -> None:
    member = Job(build, SYNC, workers=1, servers=1).member(0)
    member.context.models.clear()
    with pytest.raises(PlanError, match=r"add model = fleet\.distributed_model\(model\) before"):
        bound_plan_of(member.context)
    member.context.group.fail("")


def test_second_open_changes_nothing() -> None:
    def train(worker: Member) -> None:
        communicator = worker.communicator
        worker.session.open(worker.context)
        assert worker.communicator is communicator

    run(build, train, workers=1)


@pytest.mark.parametrize("strategy", [SYNC, ASYNC, geo(4)], ids=["sync", "async", "geo"])
def test_each_barrier_leaves_workers_equal(strategy: dict[str, Any]) -> None:
    """Also when workers make different numbers of steps."""

    def train(worker: Member) -> Any:
        seen = []
        for phase in range(3):
            for t in range(phase + 2 * worker.index):
                worker.descend(worker.model(ONE + t).sum())
            worker.barrier()
            seen += [p.detach().clone() for p in worker.model.linear.parameters()]  # type: ignore[union-attr]
        worker.barrier()
        return [*seen, torch.from_numpy(worker.rows(range(9)))]

    one, two = run(build, train, strategy, servers=2)
    for mine, theirs in zip(one, two, strict=True):
        assert torch.equal(mine, theirs)


def test_waiting_workers_learn_which_worker_failed() -> None:
    def train(worker: Member) -> None:
        worker.model(ONE).sum().backward()
        if worker.index == 1:
            raise KeyError("a bug of the script")
        worker.optimizer.step()

    zero, one = Job(build, SYNC, workers=2, servers=2).tried(train)
    assert isinstance(zero, PeerLostError)
    assert "worker 1 failed: 'a bug of the script'" in str(zero)
    assert isinstance(one, KeyError)


@pytest.mark.parametrize("strategy", [SYNC, ASYNC, geo(2)], ids=["sync", "async", "geo"])
def test_values_that_would_be_lost_are_named(
    strategy: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def train(worker: Member) -> int:
        linear: Any = worker.model.linear
        for step in range(6):
            worker.model(ONE).sum().backward()
            if step in (2, 4):
                linear.load_state_dict({k: v + 1 for k, v in linear.state_dict().items()})
            worker.optimizer.step()
            if step == 1:
                worker.barrier()
        return sum("written to since the last step" in text for text in caplog.messages)

    # once for each parameter; when workers step, a write is a difference like any other
    expected = 0 if strategy["a_sync"] else 1
    with caplog.at_level("WARNING", logger="fleetlight"):
        assert run(build, train, strategy, workers=1) == [expected]
    assert any("linear.weight, linear.bias: written to" in t for t in caplog.messages) == expected


def test_counts_of_one_use_the_singular(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fleetlight"):
        run(build, lambda worker: None, workers=1)
        run(build, lambda worker: None, workers=2, servers=3)
    lines = [text for text in caplog.messages if text.startswith("sync: ")]
    assert [text.partition(";")[0] for text in lines] == [
        "sync: 1 worker, 1 server",
        *["sync: 2 workers, 3 servers"] * 2,
    ]


def test_dense_gradients_that_are_not_finite_are_named() -> None:
    def train(worker: Member) -> None:
        worker.model(ONE).sum().backward()
        worker.model.linear.bias.grad.fill_(float("inf"))  # type: ignore[operator,union-attr]
        with pytest.raises(GradientError, match=r"linear\.bias"):
            worker.optimizer.step()

    run(build, train, workers=1)


def test_plan_of_several_models_prefixes_names() -> None:
    job = Job(build, SYNC, workers=1, servers=1)
    member = job.member(0)
    other = nn.Linear(2, 1)
    member.context.models.append(member.context.manage_model(other))
    plan = bound_plan_of(member.context).plan
    assert [table.name for table in plan.tables] == ["0.emb"]
    assert [dense.name for dense in plan.dense] == ["0.linear.weight", "0.linear.bias"]
    member.context.group.fail("")


def test_layer_reads_the_rows_of_the_servers() -> None:
    def train(worker: Member) -> Any:
        with torch.no_grad():
            rows = worker.model.emb(torch.tensor([5, 7]))  # type: ignore[operator,union-attr]
        return np.array_equal(rows.numpy(), worker.rows([5, 7]))

    assert run(build, train, workers=1, servers=3) == [True]


def test_values_that_a_barrier_replaces_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def train(worker: Member) -> int:
        linear: Any = worker.model.linear
        worker.model(ONE).sum().backward()
        worker.optimizer.step()
        linear.load_state_dict({k: v + 1 for k, v in linear.state_dict().items()})
        worker.barrier()
        return sum("written to since the last step" in text for text in caplog.messages)

    assert run(build, train, workers=1, strategy=SYNC) == [1]


def test_away_time_of_a_server_is_below_the_deadline() -> None:
    job = Job(build, {"durability": "log"}, workers=1, servers=1, deadline_s=30.0)
    assert job.run(lambda member: member.session.client._away_s) == [20.0]


@pytest.mark.parametrize(
    ("durability", "max_restarts", "is_stored", "warns"),
    [
        ("log", 2, False, True),
        ("snapshot", 1, False, True),
        ("log", 2, True, False),
        ("log", 0, False, False),
        ("none", 2, False, False),
    ],
)
def test_late_durability_is_a_warning_where_workers_may_restart(
    durability: str,
    max_restarts: int,
    is_stored: bool,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(build, SYNC | {"durability": durability}, workers=1, servers=1)
    member = job.member(0)
    member.context.role = dataclasses.replace(member.context.role, max_restarts=max_restarts)
    monkeypatch.setattr(member.session.client.journal, "is_stored", is_stored)
    with caplog.at_level("WARNING", logger="fleetlight"):
        member.session.open(member.context)
    assert any("restarts only together with all processes" in t for t in caplog.messages) == warns
    member.context.group.leave()


# WorkerDeparture: a worker leaves after SIGTERM, but never between a batch and its step.


class Merge:
    def __init__(self) -> None:
        self.open = False

    def is_between(self) -> bool:
        return self.open


@pytest.fixture
def merge() -> Merge:
    return Merge()


@pytest.fixture
def departure(merge: Merge) -> Iterator[WorkerDeparture]:
    optimizers = [types.SimpleNamespace(merge=None), types.SimpleNamespace(merge=merge)]
    job: Any = types.SimpleNamespace(role=Role(), optimizers=optimizers, step=5)
    made = WorkerDeparture(job)
    yield made
    made.close()


def test_it_stays_without_a_signal(departure: WorkerDeparture) -> None:
    departure.leave_if_asked()


def test_it_leaves_after_the_step_of_its_batch(departure: WorkerDeparture) -> None:
    departure.batch_begins()
    os.kill(os.getpid(), signal.SIGTERM)
    departure.leave_if_asked()
    departure.step_made()
    with pytest.raises(WorkerLeaves) as left:
        departure.leave_if_asked()
    assert left.value.code == 0


def test_it_leaves_after_the_last_step_of_a_merge(departure: WorkerDeparture, merge: Merge) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    departure.batch_begins()
    merge.open = True
    departure.step_made()
    departure.leave_if_asked()
    merge.open = False
    departure.step_made()
    with pytest.raises(WorkerLeaves):
        departure.leave_if_asked()


# With servers, a script without a registered optimizer may evaluate but not train.


def unregistered() -> Any:
    return Net(), []


class Dense(nn.Module):
    """A model without tables."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(ids.float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [Net, Dense])
@pytest.mark.parametrize("mode", [SYNC, ASYNC, geo(2)], ids=["sync", "async", "geo"])
def test_training_without_a_registered_optimizer_is_refused(
    model: type[nn.Module], mode: dict[str, Any]
) -> None:
    def train(worker: Member) -> None:
        optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1)
        worker.model(ONE).sum().backward()
        optimizer.step()

    [error] = Job(lambda: (model(), []), mode, workers=1, servers=1).tried(train)
    assert isinstance(error, PlanError)
    assert "add optimizer = fleet.distributed_optimizer(optimizer) before" in str(error)


def test_evaluation_needs_no_optimizer() -> None:
    def evaluate(worker: Member) -> Any:
        with torch.no_grad():
            without = worker.model(ONE)
        # also with gradients enabled, as long as no backward runs
        return torch.equal(without, worker.model(ONE))

    assert run(unregistered, evaluate, workers=1) == [True]


def test_step_of_an_optimizer_registered_too_late_is_refused() -> None:
    def train(worker: Member) -> None:
        worker.model(ONE)
        optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1)
        worker.context.optimizers.append(worker.context.manage_optimizer(optimizer))
        worker.model(ONE).sum().backward()
        optimizer.step()

    [error] = Job(unregistered, SYNC, workers=1, servers=1).tried(train)
    assert "registered after training had begun" in str(error)


def test_model_trains_locally_after_the_job() -> None:
    def leave(worker: Member) -> None:
        worker.model(ONE)
        [plan] = worker.context.models
        plan.close()
        worker.model(ONE).sum().backward()

    run(lambda: (Dense(), []), leave, workers=1)
