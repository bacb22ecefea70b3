# SPDX-License-Identifier: Apache-2.0
"""Local SGD and DiLoCo in real jobs, which equal a simulation, and their checkpoints."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import error_text
from tests.fleet.local_training import (
    OPTIMIZERS,
    Case,
    Simulation,
    batches,
    everything,
    flat,
    loss_of,
    network,
)
from tests.workers import descend, run_workers
from torch import nn

import fleetlight as fleet
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.errors import DivergedError, PlanError
from fleetlight.fleet.job import current
from fleetlight.fleet.training import local_training
from fleetlight.observe.log import logger

pytestmark = pytest.mark.multiprocess


def registered(optimizer: str = "momentum", **settings: Any) -> tuple[nn.Sequential, Any]:
    model = fleet.distributed_model(network())
    strategy = fleet.DistributedStrategy(**settings)
    return model, fleet.distributed_optimizer(OPTIMIZERS[optimizer](model.parameters()), strategy)


def localsgd(k: int, begin_step: int = 0, **configs: Any) -> dict[str, Any]:
    return {
        "localsgd": True,
        "localsgd_configs": {"k_steps": k, "begin_step": begin_step, **configs},
    }


def step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    descend(optimizer, loss_of(model, batch))


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for batch in batches(fleet.worker_index(), first + steps)[first:]:
        step(model, optimizer, batch)


def apart(model: nn.Module) -> bool:
    """Whether the workers' parameters differ in any bit."""
    digests = fleet.all_gather(flat(model.parameters()))
    return not all(torch.equal(one, digests[0]) for one in digests)


def job(case: Case) -> Any:
    model, optimizer = registered(case.optimizer, **case.settings())
    reduced: list[int] = []
    reduce = Reducer.reduce

    def counted(self: Reducer, bucket: Any) -> Any:
        reduced.append(current().step)
        return reduce(self, bucket)

    Reducer.reduce = counted  # type: ignore[method-assign]
    train(model, optimizer, case.steps)
    Reducer.reduce = reduce  # type: ignore[method-assign]
    return everything(model), sorted(set(reduced))


CASES = {
    "adam-averaged": (Case("adam", optimizer_state="average", buffers="rank0"), 2),
    "momentum": (Case(), 2),
    "adam-reset": (Case("adam", optimizer_state="reset", begin_step=0, steps=7), 2),
    "three-workers": (Case(k=2, steps=6), 3),
    "diloco": (Case("adam", outer=(0.7, 0.9), begin_step=1, steps=10), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_job_equals_the_simulation(name: str) -> None:
    case, workers = CASES[name]
    expected = Simulation(case, workers).run()
    for (result, reduced), mine in zip(run_workers(job, workers, case), expected, strict=True):
        torch.testing.assert_close(result, mine, rtol=0, atol=1e-12)
        # a gradient is reduced before its step counts, an average comes after it
        together = range(case.begin_step)
        averagings = range(case.begin_step + case.k, case.steps + 1, case.k)
        assert reduced == sorted({*together, *averagings})


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, None),
        (localsgd(1), None),
        (localsgd(2), "localsgd"),
        ({"adaptive_localsgd": True, "adaptive_localsgd_configs": {"max_k_steps": 1}}, None),
        ({"adaptive_localsgd": True}, "adaptive_localsgd"),
        # an outer step is useful even after every step
        ({"diloco": True, "diloco_configs": {"k_steps": 1}}, "diloco"),
    ],
    ids=["off", "k of 1", "localsgd", "max k of 1", "adaptive", "diloco"],
)
def test_average_at_every_step_is_synchronous_training(settings: Any, mode: str | None) -> None:
    chosen = local_training.chosen(fleet.DistributedStrategy(**settings))
    assert (chosen and chosen[0]) == mode


def without_effect() -> Any:
    """With k of 1, or before begin_step, training is synchronous."""
    warnings: list[str] = []
    logger.addFilter(lambda record: bool(warnings.append(record.getMessage())) or True)
    model, optimizer = registered(**localsgd(100, begin_step=50))
    train(model, optimizer, 4)
    result = everything(model), apart(model)
    fleet.stop_worker()
    return (*result, [text for text in warnings if "never trained alone" in text])


def every_step() -> Any:
    model, optimizer = registered(**localsgd(1))
    train(model, optimizer, 4)
    return everything(model), current().optimizers[0].local_steps, apart(model)


def test_unreached_begin_step_is_synchronous_and_warns() -> None:
    expected = Simulation(Case(begin_step=9, steps=4), 2).run()
    (first, differ, [warning]), (_, _, untold) = run_workers(without_effect)
    torch.testing.assert_close(first, expected[0], rtol=0, atol=1e-12)
    assert not differ
    assert warning.startswith("localsgd: the job ended after step 4, and up to begin_step = 50")
    assert untold == []
    for (result, alone, differ), mine in zip(run_workers(every_step), expected, strict=True):
        torch.testing.assert_close(result, mine, rtol=0, atol=1e-12)
        assert (alone, differ) == (None, False)


def adaptive() -> Any:
    """Five windows, alternately with backward and minimize."""
    configs = {"init_k_steps": 3, "max_k_steps": 6, "begin_step": 1}
    model, optimizer = registered("sgd", adaptive_localsgd=True, adaptive_localsgd_configs=configs)
    schedule: Any = None
    seen, ks = [], []
    for number, batch in enumerate(batches(fleet.worker_index(), 16)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if number % 2:
            optimizer.minimize(loss)
        else:
            loss.backward()
            optimizer.step()
        alone = current().optimizers[0].local_steps
        assert alone is not None
        schedule = alone.engine.schedule
        seen.append(float(loss))
        ks.append((schedule.step == schedule.last, schedule.k))
        if number == 6:
            optimizer.param_groups[0]["lr"] *= 0.3
    differ = apart(model)
    backward = torch.Tensor.backward
    fleet.stop_worker()
    return seen, ks, differ, backward is torch.Tensor.backward


def expected_ks(losses: list[float]) -> list[tuple[bool, int]]:
    ks, k, last = [], 3, 1
    for number, loss in enumerate(losses, 1):
        lr = 0.1 if number <= 7 else 0.03
        averaged = number == 1 or number - last == k
        if averaged and number > 1:
            k = min(6, max(1, math.ceil(3 * math.sqrt(0.1 * loss / (lr * losses[0])))))
        last = number if averaged else last
        ks.append((averaged, k))
    return ks


def test_adaptive_k_follows_the_loss_and_the_learning_rate() -> None:
    (one, ks, _, left), (two, others, _, _) = run_workers(adaptive)
    assert ks == others == expected_ks([(a + b) / 2 for a, b in zip(one, two, strict=True)])
    assert len({k for _, k in ks}) > 1
    # torch's own method is not replaced
    assert left


def adaptive_without_a_loss() -> str:
    configs = {"init_k_steps": 2, "begin_step": 0}
    model, optimizer = registered("sgd", adaptive_localsgd=True, adaptive_localsgd_configs=configs)
    for batch in batches(fleet.worker_index(), 2):
        # a list is no loss
        torch.autograd.backward([loss_of(model, batch)])
        try:
            optimizer.step()
        except PlanError as error:
            return str(error)
    return "met"


def test_adaptive_without_a_loss_names_the_remedy() -> None:
    for text in run_workers(adaptive_without_a_loss):
        assert "call loss.backward() or optimizer.minimize(loss)" in text


def weighed() -> Any:
    """The gradients of a short batch, and of a batch that repeats a record."""
    model, optimizer = registered("sgd", **localsgd(5))
    [batch] = batches(0, 1)
    norms = []
    for weight in (1.0, 0.25, 0.0):
        current().models[0].set_batch_weight(weight)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norms.append(float(flat(p.grad for p in model.parameters() if p.grad is not None).norm()))
    return norms


def test_local_short_batch_counts_fully_and_a_repeated_record_not() -> None:
    for whole, short, nothing in run_workers(weighed):
        assert short == whole > 0
        assert nothing == 0


def accumulated() -> Any:
    """Two backwards a step: merged, and with no_sync. Each worker clips its own gradients."""
    merging = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    model, optimizer = registered("sgd", **localsgd(2), **merging)
    data = batches(fleet.worker_index(), 12)
    differ = []
    for batch in data:
        step(model, optimizer, batch)
        differ.append(apart(model))
    return differ, current().step


def held_back() -> Any:
    model, optimizer = registered("sgd", **localsgd(2))
    data = batches(fleet.worker_index(), 4)
    norms = []
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        with fleet.no_sync():
            loss_of(model, first).backward()
        loss_of(model, second).backward()
        norms.append(float(fleet.clip_grad_norm_(model, 0.1)))
        optimizer.step()
    return norms, apart(model)


def test_merged_step_counts_once() -> None:
    for differ, steps in run_workers(accumulated):
        # steps come after every second batch, averages after every fourth
        assert differ == [False, True, True, False] * 3
        assert steps == 6


def test_accumulation_and_clipping_are_local() -> None:
    (norms, differ), (others, _) = run_workers(held_back)
    assert not set(norms) & set(others)
    assert not differ


def with_a_barrier() -> Any:
    model, optimizer = registered(**localsgd(4))
    train(model, optimizer, 2)
    before = apart(model)
    fleet.barrier_worker()
    after = apart(model)
    buffers = fleet.all_gather(model[1].running_mean)
    train(model, optimizer, 3, first=2)
    late = apart(model)
    train(model, optimizer, 1, first=5)
    return before, after, torch.equal(*buffers), late, apart(model)


def test_barrier_leaves_the_workers_equal() -> None:
    assert run_workers(with_a_barrier) == [(True, False, True, True, False)] * 2


def with_different_steps() -> str:
    model, optimizer = registered(**localsgd(8))
    train(model, optimizer, 2 + fleet.worker_index())
    return error_text(DivergedError, fleet.barrier_worker)


def with_different_rates() -> str:
    model, optimizer = registered(**localsgd(2))
    optimizer.param_groups[0]["lr"] = 0.1 + fleet.worker_index()
    return error_text(DivergedError, train, model, optimizer, 2)


def test_average_refuses_workers_with_different_steps_or_rates() -> None:
    for text in run_workers(with_different_steps):
        assert "2 on worker 0, but 3 on worker 1" in text
    for text in run_workers(with_different_rates):
        assert "lr of group 0 of optimizer 0 is 0.1 on worker 0, but 1.1 on worker 1" in text


def scaled(enabled: bool) -> str:
    model, optimizer = registered("sgd", **localsgd(2))
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    [batch] = batches(fleet.worker_index(), 1)
    scaler.scale(loss_of(model, batch)).backward()
    try:
        scaler.step(optimizer)
    except PlanError as error:
        return str(error)
    return "stepped"


def test_loss_scaler_is_refused() -> None:
    for text in run_workers(scaled, 2, True):
        assert text.startswith("localsgd: a GradScaler steps the optimizer")
    assert run_workers(scaled, 2, False) == ["stepped"] * 2


def with_closures() -> Any:
    """LBFGS decides by the loss of its closure, which is the worker's own."""
    model = fleet.distributed_model(nn.Linear(6, 1).double())
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2 + 0)
    optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(**localsgd(2)))
    losses = []
    for x, _ in batches(fleet.worker_index(), 2):

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses, apart(model)


def test_closures_return_the_loss_of_their_worker() -> None:
    (one, differ), (two, _) = run_workers(with_closures)
    assert not set(one) & set(two)
    assert not differ


def two_optimizers() -> Any:
    """A discriminator steps twice as often; each optimizer counts its own steps."""
    strategy = fleet.DistributedStrategy(**localsgd(2))
    models = [fleet.distributed_model(network()) for _ in range(2)]
    optimizers: list[Any] = [
        fleet.distributed_optimizer(OPTIMIZERS["sgd"](model.parameters()), strategy)
        for model in models
    ]
    differ = []
    for number, batch in enumerate(batches(fleet.worker_index(), 4)):
        step(models[0], optimizers[0], batch)
        if number % 2:
            step(models[1], optimizers[1], batch)
        differ.append([apart(model) for model in models])
    return differ


def test_each_optimizer_counts_its_own_steps() -> None:
    expected = [[True, False], [False, True], [True, True], [False, False]]
    assert run_workers(two_optimizers) == [expected] * 2


def frozen_between_averages() -> Any:
    """A layer freezes between averages; then one joins. No worker loses progress."""
    model, optimizer = registered("sgd", **localsgd(3))
    data = batches(fleet.worker_index(), 9)
    first: Any = model[0]
    differ = []
    for number, batch in enumerate(data):
        if number == 1:
            first.requires_grad_(False)
        if number == 4:
            first.requires_grad_(True)
        step(model, optimizer, batch)
        differ.append(apart(first))
    alone = current().optimizers[0].local_steps
    assert alone is not None
    return differ, apart(model), alone.engine.averagings


def test_parameters_frozen_between_averages_are_averaged_once_more() -> None:
    differ = [True, True, False, False, True, False, True, True, False]
    assert run_workers(frozen_between_averages) == [(differ, False, 3)] * 2


def joined_between_averages() -> Any:
    """A layer joins between averages; each worker has drawn it from another seed."""
    model, optimizer = registered("sgd", **localsgd(2))
    differ = []
    for number, batch in enumerate(batches(fleet.worker_index(), 5)):
        if number == 1:
            torch.manual_seed(fleet.worker_index())
            model.add_module("joined", nn.Linear(3, 3).double())
            optimizer.add_param_group({"params": list(model.joined.parameters())})  # type: ignore[operator, union-attr]
        step(model, optimizer, batch)
        differ.append(apart(model))
    fleet.barrier_worker()
    return differ, apart(model)


def test_parameters_that_join_between_averages_start_equal() -> None:
    assert run_workers(joined_between_averages) == [([True, False, True, False, True], False)] * 2


def small_movements() -> Any:
    """Parameters start at zero and move by a small learning rate."""
    model = fleet.distributed_model(nn.Linear(6, 4))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    settings = {"compression": "fp16", "shared_memory": False}
    strategy = fleet.DistributedStrategy(**localsgd(2), **settings)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-8), strategy)
    for _ in range(2):
        descend(optimizer, model(torch.ones(1, 6)).sum())
    return flat(model.parameters())


def test_movements_too_small_for_float16_are_averaged() -> None:
    for end in run_workers(small_movements):
        torch.testing.assert_close(end, torch.full_like(end, -2e-8), rtol=0.01, atol=0)


def accounted() -> Any:
    """The end of the job waits only for the average after the last step."""
    model, optimizer = registered("sgd", **localsgd(3))
    train(model, optimizer, 2)
    before = fleet.account().waited_s
    train(model, optimizer, 1, first=2)
    return before, fleet.account().waited_s


def test_average_counts_as_part_of_the_step_before_it() -> None:
    for before, waited in run_workers(accounted):
        assert before == 0 < waited


def ended_apart(steps: int, folder: Path) -> list[str]:
    messages: list[str] = []
    logger.addFilter(lambda record: bool(messages.append(record.getMessage())) or True)
    model, optimizer = registered("sgd", **localsgd(4))
    train(model, optimizer, steps)
    fleet.save_inference_model(str(folder), torch.zeros(2, 6).double(), model)
    fleet.stop_worker()
    return [text for text in messages if "after the last average" in text]


def test_worker_0_warns_when_workers_differ_at_a_save_or_the_end(tmp_path: Path) -> None:
    (saved, ended), others = run_workers(ended_apart, 2, 6, tmp_path / "apart")
    assert saved.startswith("save_inference_model: it takes the parameters of this worker")
    assert ended.startswith("localsgd: the job ended 2 steps after the last average")
    assert all("call fleet.barrier_worker()" in text for text in (saved, ended))
    assert others == []
    assert run_workers(ended_apart, 2, 4, tmp_path / "equal") == [[], []]


def coded(compression: str) -> Any:
    """Only the movements travel narrow or coded."""
    configs = {"min_size": 1} if compression == "int8" else {}
    settings = {"compression": compression, "compression_configs": configs}
    model = fleet.distributed_model(network().float())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    strategy = fleet.DistributedStrategy(**localsgd(9), **settings, shared_memory=False)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    for x, y in batches(fleet.worker_index(), 2):
        # so small that their squares underflow in float16
        step(model, optimizer, (x.float() * 1e-3, y))
    exact = [model[1].running_var, *(state["exp_avg_sq"] for state in optimizer.state.values())]
    before = fleet.all_gather(flat(model.parameters())), fleet.all_gather(flat(exact))
    fleet.barrier_worker()
    alone = current().optimizers[0].local_steps
    assert alone is not None
    alone.average_with_states()
    return before, (flat(model.parameters()), flat(exact)), apart(model)


@pytest.mark.parametrize("compression", ["int8", "fp16"])
def test_only_movements_are_coded_and_not_statistics_and_moments(compression: str) -> None:
    for (ends, exact), (end, exact_end), differ in run_workers(coded, 2, compression):
        assert not differ
        torch.testing.assert_close(exact_end, torch.stack(exact).mean(0), rtol=1e-6, atol=0)
        off = (end - torch.stack(ends).mean(0)).abs().max()
        assert 1e-7 < off < 1e-3


# Checkpoints under local training: a continued job equals a loaded one.

BEFORE, AFTER = 5, 7

ADAPTIVE = {
    "adaptive_localsgd": True,
    "adaptive_localsgd_configs": {"init_k_steps": 3, "begin_step": 0},
}
KINDS: dict[str, Any] = {
    "adam-kept": ("adam", Case(k=4, begin_step=1).settings()),
    "diloco": ("momentum", Case(k=3, begin_step=0, outer=(0.7, 0.9)).settings()),
    "adaptive": ("momentum", ADAPTIVE),
}


def registered_as(kind: str, **more: Any) -> tuple[nn.Module, Any]:
    optimizer, settings = KINDS.get(kind, (kind, {}))
    model = fleet.distributed_model(network())
    strategy = fleet.DistributedStrategy(**settings, **more)
    return model, fleet.distributed_optimizer(OPTIMIZERS[optimizer](model.parameters()), strategy)


def train_from(model: nn.Module, optimizer: Any, first: int, steps: int) -> None:
    for batch in batches(fleet.worker_index(), first + steps)[first:]:
        descend(optimizer, loss_of(model, batch))


def end_of(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    return [everything(model), *(state[key].clone() for state in states for key in sorted(state))]


def schedule_of() -> Any:
    alone = current().optimizers[0].local_steps
    assert alone is not None
    return alone.engine.schedule


def save_and_continue(kind: str, dirname: str) -> Any:
    model, optimizer = registered_as(kind)
    train_from(model, optimizer, 0, BEFORE)
    fleet.save_persistables(dirname, background=True)
    at_the_save = end_of(model, optimizer)
    train_from(model, optimizer, BEFORE, AFTER)
    return at_the_save, end_of(model, optimizer), schedule_of().state()


def load_and_continue(kind: str, dirname: str, steps_before: int) -> Any:
    model, optimizer = registered_as(kind)
    train_from(model, optimizer, 20, steps_before)  # gradients that a load drops
    fleet.load_persistables(dirname)
    train_from(model, optimizer, BEFORE, AFTER)
    return end_of(model, optimizer), schedule_of().state()


@pytest.mark.parametrize(
    ("kind", "steps_before"),
    [("adam-kept", 0), ("diloco", 2), ("adaptive", 4)],
    ids=lambda value: str(value),
)
def test_continued_job_equals_a_loaded_one(kind: str, steps_before: int, tmp_path: Path) -> None:
    continued = run_workers(save_and_continue, 2, kind, str(tmp_path))
    loaded = run_workers(load_and_continue, 2, kind, str(tmp_path), steps_before)
    # after the save all workers are equal, also in their optimizer states
    assert same(continued[0][0], continued[1][0])
    assert not same(continued[0][1], continued[1][1])
    for (_, end, state), (again, other_state) in zip(continued, loaded, strict=True):
        assert same(end, again)
        assert state == other_state


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def save(kind: str, dirname: str) -> None:
    model, optimizer = registered_as(kind)
    train_from(model, optimizer, 0, BEFORE)
    fleet.save_persistables(dirname)


def load(kind: str, dirname: str) -> Any:
    model, optimizer = registered_as(kind)
    fleet.load_persistables(dirname)
    values = everything(model)
    train_from(model, optimizer, BEFORE, 1)
    alone = current().optimizers[0].local_steps
    return values, current().step, None if alone is None else alone.engine.schedule.state()


@pytest.mark.parametrize(
    ("saved", "loaded", "workers", "state"),
    [
        ("diloco", "diloco", 3, {"step": 6, "last": 5}),
        ("momentum", "diloco", 2, {"step": 6, "last": 5}),
        ("diloco", "momentum", 2, None),
    ],
    ids=["more-workers", "from-synchronous", "to-synchronous"],
)
def test_jobs_of_other_kinds_load_the_checkpoint(
    saved: str, loaded: str, workers: int, state: Any, tmp_path: Path
) -> None:
    run_workers(save, 2, saved, str(tmp_path))
    first, *others = run_workers(load, workers, loaded, str(tmp_path))
    assert first[1:] == (BEFORE + 1, state)
    for values, *rest in others:
        assert torch.equal(values, first[0])
        assert rest == list(first[1:])
