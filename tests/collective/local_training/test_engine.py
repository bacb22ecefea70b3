# SPDX-License-Identifier: Apache-2.0
"""What the engine sends, when, and what all workers have afterwards; workers are threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.collective.local_training.simulated import together
from torch import nn

from fleetlight.collective.local_training import engine as moments
from fleetlight.collective.local_training.engine import LocalTrainingEngine
from fleetlight.collective.local_training.outer import Member, NesterovMomentum, PlainMean
from fleetlight.collective.local_training.schedule import AdaptiveInterval, FixedInterval
from fleetlight.errors import DivergedError


class Training:
    """A worker with a small model and its own gradients."""

    def __init__(self, worker: Any, engine: Any = FixedInterval, **settings: Any) -> None:
        self.worker = worker
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
        torch.nn.init.ones_(self.model[0].weight)
        torch.nn.init.zeros_(self.model[0].bias)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        settings = {"schedule": FixedInterval(2, 0), "outer": PlainMean(), **settings}
        self.engine = LocalTrainingEngine(self.optimizer, worker, **settings)
        self.engine.trains(self.model.parameters())

    @property
    def members(self) -> list[Member]:
        parameters, buffers = self.model.named_parameters(), self.model.named_buffers()
        return [Member(self.worker, dict(parameters), dict(buffers))]

    def step(self, number: int, loss: float | None = None) -> bool:
        self.engine.before_step()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, self.worker.index + number)
        self.optimizer.step()
        return self.engine.step_made(self.members, None if loss is None else torch.tensor(loss))

    @property
    def weight(self) -> torch.Tensor:
        return self.model[0].weight.detach().clone()

    def momentum(self) -> torch.Tensor:
        buffer: torch.Tensor = self.optimizer.state[self.model[0].weight]["momentum_buffer"]
        return buffer.clone()


def some_steps(worker: Any) -> Any:
    training = Training(worker)
    averaged = [(training.step(number), training.weight) for number in range(4)]
    return averaged, worker.means


def test_workers_send_only_at_averaging_and_are_equal_after_it() -> None:
    (one, means), (two, _) = together(some_steps)
    assert [averaged for averaged, _ in one] == [False, True, False, True]
    assert [torch.equal(a, b) for (_, a), (_, b) in zip(one, two, strict=True)] == [
        *(False, True),
        *(False, True),
    ]
    moved = [f"moved/{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    assert means == [[*moved, "buffer/1.running_mean", "buffer/1.running_var"]] * 2


def with_buffers(worker: Any, policy: str) -> Any:
    training = Training(worker, buffers=policy)
    norm: Any = training.model[1]
    norm.running_mean.fill_(worker.index)
    norm.num_batches_tracked.fill_(5 + worker.index)
    training.engine.before_step()
    training.step(0)
    training.step(1)
    return float(norm.running_mean[0]), int(norm.num_batches_tracked)


def test_buffers_are_averaged_and_counts_come_from_worker_0() -> None:
    assert together(lambda worker: with_buffers(worker, "average")) == [(0.5, 5)] * 2


def test_policy_rank0_broadcasts_all_buffers() -> None:
    assert together(lambda worker: with_buffers(worker, "rank0")) == [(0.0, 5)] * 2


def with_moments(worker: Any, policy: str) -> Any:
    training = Training(worker, optimizer_state=policy)
    training.step(0)
    training.step(1)
    buffer = training.optimizer.state[training.model[0].weight].get("momentum_buffer")
    return buffer if buffer is None else float(buffer[0, 0])


def test_optimizer_state_is_kept_averaged_or_reset() -> None:
    assert together(lambda worker: with_moments(worker, "keep")) == [1.0, 2.5]
    assert together(lambda worker: with_moments(worker, "average")) == [1.75, 1.75]
    assert together(lambda worker: with_moments(worker, "reset")) == [None, None]


def early_and_settled(worker: Any) -> Any:
    training = Training(worker, schedule=FixedInterval(5, 0))
    training.step(0)
    first = training.engine.average_early(training.members), training.weight
    momentum_before = training.momentum()
    training.engine.settle(training.members)
    sent = len(worker.means)
    # nothing remains to be averaged
    again = training.engine.average_early(training.members)
    training.engine.settle(training.members)
    return first, momentum_before, training.momentum(), again, len(worker.means) - sent


def test_early_averaging_and_settling_of_optimizers() -> None:
    one, two = together(early_and_settled)
    assert one[0][0] is two[0][0] is True
    assert torch.equal(one[0][1], two[0][1])
    assert not torch.equal(one[1], two[1])
    assert torch.equal(one[2], two[2])
    assert one[3:] == two[3:] == (False, 0)


def up_to_begin_step(worker: Any) -> Any:
    training = Training(worker, schedule=FixedInterval(2, 3))
    averaged = [training.step(number) for number in range(3)]
    early = training.engine.average_early(training.members)
    training.engine.settle(training.members)
    return averaged, early, worker.means


def test_the_engine_is_idle_up_to_begin_step() -> None:
    assert together(up_to_begin_step) == [([False] * 3, False, [])] * 2


def frozen_on_the_way(worker: Any) -> Any:
    """The first layer is frozen within a window; another parameter joins in the next."""
    training = Training(worker, outer=NesterovMomentum(0.5, 0.9))
    layer: Any = training.model[0]
    training.step(0)
    layer.requires_grad_(False)
    training.engine.trains(training.model[1].parameters())
    training.step(0)
    names = [list(worker.means[-1])]
    still = training.weight
    training.model.add_module("2", nn.Linear(2, 2).double())
    torch.nn.init.ones_(training.model[2].weight)  # type: ignore[arg-type]
    training.optimizer.add_param_group({"params": list(training.model[2].parameters())})
    training.engine.trains([*training.model[1].parameters(), *training.model[2].parameters()])
    layer.weight.grad = layer.bias.grad = None
    training.step(0)
    training.step(0)
    return [*names, list(worker.means[-1])], still, training.weight


def test_frozen_parameters_average_once_more_and_new_ones_join() -> None:
    (names, still, end), (_, other, other_end) = together(frozen_on_the_way)
    assert "moved/0.weight" in names[0]
    assert "moved/0.weight" not in names[1]
    assert {"moved/1.weight", "moved/2.weight"} <= set(names[1])
    assert torch.equal(still, other)
    assert torch.equal(end, other_end)


def with_a_new_parameter(worker: Any) -> Any:
    """The first values of a joining parameter differ by worker: index + 1."""
    training = Training(worker)
    training.step(0)
    training.model.add_module("2", nn.Linear(2, 2, bias=False).double())
    new: Any = training.model[2].weight
    torch.nn.init.constant_(new, worker.index + 1)
    training.optimizer.add_param_group({"params": [new]})
    training.engine.trains(training.model.parameters(), agreed=False)
    training.step(0)
    first = new.detach().clone()
    shared = worker.broadcasts
    training.step(0)
    training.step(0)
    return first, new.detach().clone(), worker.broadcasts - shared


def test_a_parameter_added_between_averagings_starts_from_worker_0() -> None:
    (one, end, shared), (two, other_end, _) = together(with_a_new_parameter)
    # gradients are 0 on worker 0 and 1 on worker 1
    torch.testing.assert_close(one, torch.full_like(one, 1 - 0.1 / 2))
    assert torch.equal(one, two)
    assert torch.equal(end, other_end)
    # the next averaging broadcasts only the count of batches
    assert shared == 1


def adaptive(worker: Any) -> Any:
    """Losses are 8 at first, then 2: k = ceil(4 sqrt(2 / 8)) = 2, then 1 / 2 of the rate."""
    training = Training(worker, schedule=AdaptiveInterval(4, 16, 0))
    ks = []
    for number in range(8):
        wants_loss = training.engine.wants_loss
        loss = (8.0 if number == 0 else 2.0) + (worker.index - 0.5)
        training.step(0, loss if wants_loss else None)
        ks.append((wants_loss, training.engine.schedule.k))
        if number == 4:
            training.optimizer.param_groups[0]["lr"] /= 4
    return ks, sum(names == ["loss"] for names in worker.means)


def test_k_follows_the_mean_loss_of_all_workers() -> None:
    expected = [
        *[(True, 4), (False, 4), (False, 4), (True, 2)],
        *[(False, 2), (True, 4), (False, 4), (False, 4)],
    ]
    assert together(adaptive) == [(expected, 3)] * 2


def worker_1_without_a_loss(worker: Any) -> Any:
    training = Training(worker, schedule=AdaptiveInterval(4, 16, 0))
    training.step(0, None if worker.index else 8.0)
    wants_loss = training.engine.wants_first_loss
    training.step(0, 4.0)
    schedule: Any = training.engine.schedule
    return wants_loss, schedule.loss_0


def test_a_first_loss_missing_on_a_worker_is_requested_again() -> None:
    assert together(worker_1_without_a_loss) == [(True, 4.0)] * 2


def resumed(worker: Any) -> Any:
    """Continuing, and loading the state into another engine, give equal results."""
    first = Training(worker, outer=NesterovMomentum(0.7, 0.9), schedule=FixedInterval(3, 1))
    for number in range(5):
        first.step(number)
    first.engine.average_early(first.members)
    first.engine.settle(first.members)
    second = Training(worker, outer=NesterovMomentum(0.7, 0.9), schedule=FixedInterval(3, 1))
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    names = {p: name for name, p in first.model.named_parameters()}
    state = first.engine.state(names)
    state["outer"] = {name: tensor.clone() for name, tensor in state["outer"].items()}
    second.step(0)  # the load must discard this step
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.engine.load(state, {p: name for name, p in second.model.named_parameters()})
    ends = []
    for training in (first, second):
        averaged = [training.step(number) for number in range(5, 11)]
        ends.append((averaged, training.weight))
    return ends


def test_a_loaded_state_continues_the_training() -> None:
    for (averaged, weight), (other, other_weight) in together(resumed):
        assert averaged == other == [False, False, True, False, False, True]
        assert torch.equal(weight, other_weight)


def restarted(worker: Any) -> Any:
    training = Training(worker, outer=NesterovMomentum(0.7, 0.9), schedule=FixedInterval(3, 4))
    for number in range(9):
        training.step(number)
    names = {p: name for name, p in training.model.named_parameters()}
    training.engine.restart_at(100, names)
    state = training.engine.state(names)
    return state["schedule"], state["outer"], training.engine.next_is_local


def test_restart_at_drops_the_averaging_state() -> None:
    assert together(restarted) == [({"step": 100, "last": 100}, {}, True)] * 2


KINDS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def stepped(kind: str, seed: int, steps: int = 3, parameters: int = 2) -> torch.optim.Optimizer:
    """An optimizer after some steps on the first of its two parameters, or on both."""
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]
    optimizer: torch.optim.Optimizer = KINDS[kind](params)
    step_on(optimizer, seed, steps, parameters)
    return optimizer


def step_on(optimizer: torch.optim.Optimizer, seed: int, steps: int, parameters: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in optimizer.param_groups[0]["params"][:parameters]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [dict(optimizer.state[p]) for p in optimizer.param_groups[0]["params"]]


def averaged(worker: Any) -> Any:
    optimizer = stepped("adam", seed=worker.index)
    before = [{key: t.clone() for key, t in one.items()} for one in state_of(optimizer)]
    moments.average_state(optimizer, worker, worker)
    return before, state_of(optimizer)


def test_tensors_are_averaged_and_step_counts_kept() -> None:
    (before, after), (other_before, other_after) = together(averaged)
    for mine, theirs, end, other_end in zip(before, other_before, after, other_after, strict=True):
        assert set(end) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            torch.testing.assert_close(end[key], (mine[key] + theirs[key]) / 2)
            assert torch.equal(end[key], other_end[key])
        assert end["step"] == 3.0


def averaged_with_gaps(worker: Any) -> Any:
    """Worker 0 has no gradient for the second parameter, and no state for it."""
    optimizer = stepped("adam", seed=worker.index, parameters=1 + worker.index)
    before = optimizer.state[optimizer.param_groups[0]["params"][1]].get("exp_avg")
    before = None if before is None else before.clone()
    moments.average_state(optimizer, worker, worker)
    step_on(optimizer, seed=7, steps=1)
    return before, state_of(optimizer)


def test_missing_state_counts_as_zeros() -> None:
    (nothing, first), (some, second) = together(averaged_with_gaps)
    assert nothing is None
    assert some is not None
    assert first[1]["step"] == second[1]["step"] == 4.0
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq"))


def average_different_types(worker: Any) -> str:
    dtype = torch.float64 if worker.index else torch.float32
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(DivergedError) as error:
        moments.average_state(optimizer, worker, worker)
    return str(error.value)


def test_states_of_different_types_are_named() -> None:
    for text in together(average_different_types):
        assert "momentum_buffer of parameter 0 in group 0 is float64[3] on one worker" in text


def check_equal_steps(optimizer: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """From equal parameters, equal states give equal steps."""
    both = [one.param_groups[0]["params"] for one in (optimizer, new)]
    with torch.no_grad():
        torch._foreach_copy_(*both)
    for one in (optimizer, new):
        step_on(one, seed=5, steps=2)
    for mine, fresh in zip(*both, strict=True):
        assert torch.equal(mine, fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_reset_an_optimizer_steps_as_a_new_one(kind: str) -> None:
    optimizer, new = stepped(kind, seed=0), stepped(kind, seed=0, steps=0)
    moments.reset_state(optimizer)
    check_equal_steps(optimizer, new)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dampening"])
def test_a_reset_in_place_keeps_the_tensors(kind: str) -> None:
    optimizer, new = stepped(kind, seed=0), stepped(kind, seed=0, steps=0)
    before = state_of(optimizer)
    moments.reset_state(optimizer, in_place=True)
    for mine, kept in zip(state_of(optimizer), before, strict=True):
        assert all(mine[key] is kept[key] for key in kept)
    check_equal_steps(optimizer, new)
