# SPDX-License-Identifier: Apache-2.0
"""The registered optimizer: minimize, clipping, merged gradients, and two strategies."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.workers import descend, run_processes, run_workers
from torch import nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight.errors import PlanError, StrategyError
from fleetlight.fleet.job import current
from fleetlight.observe.log import logger
from fleetlight.strategy import DistributedStrategy, differences

pytestmark = pytest.mark.multiprocess


def records() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, generator=generator).double()
    return x, torch.randint(0, 3, (24,), generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).double()


def my_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(fleet.worker_num())[fleet.worker_index()]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def minimized(before: str = "") -> Any:
    strategy = fleet.DistributedStrategy()
    if before == "merge":
        strategy = fleet.DistributedStrategy(gradient_merge=True)
        strategy.gradient_merge_configs = {"k_steps": 2}
    model = fleet.distributed_model(network())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(sgd, strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert isinstance(optimizer, torch.optim.SGD)
    x, y = my_part(records()[0]), my_part(records()[1])
    for _ in range(3):
        parts = 2 if before == "merge" else 1
        for part, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(part), targets)
            if before:
                loss.backward(retain_graph=before == "retained")
            optimizer.minimize(loss)
            optimizer.zero_grad()
        scheduler.step()
    return flat(model), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("before", ["merge", "", "backward", "retained"])
@pytest.mark.parametrize("workers", [2, 1])
def test_minimize_equals_backward_and_step(before: str, workers: int) -> None:
    """With `before`, the script calls backward first, as Fleet's scripts do."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, y = records()
    for _ in range(3):
        descend(optimizer, F.cross_entropy(model(x), y))
        scheduler.step()
    for result, lr in run_workers(minimized, workers, before):
        torch.testing.assert_close(result, flat(model), rtol=0, atol=1e-12)
        assert lr == 0.0125


@pytest.mark.parametrize("workers", [2, 1])
def test_step_after_minimize_is_refused(workers: int) -> None:
    run_workers(stepped_again, workers)


def stepped_again() -> None:
    model = fleet.distributed_model(network())
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = records()
    for _ in range(2):
        optimizer.minimize(F.cross_entropy(model(x), y))
        before = flat(model)
        with pytest.raises(PlanError, match="which has made the step"):
            optimizer.step()
        torch.testing.assert_close(flat(model), before, rtol=0, atol=0)
    # other gradients make another step
    descend(optimizer, F.cross_entropy(model(x), y))
    assert not torch.equal(flat(model), before)


def accumulated_after_minimize(tables: bool) -> None:
    first = fleet.nn.SparseEmbedding(2) if tables else nn.Embedding(4, 2)
    model = fleet.distributed_model(nn.Sequential(first, nn.Linear(2, 1)))
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(4)
    optimizer.minimize(model(ids).sum())
    with pytest.raises(PlanError, match="which has made the step"):
        optimizer.step()
    # another backward has changed these gradients
    model(ids).sum().backward()
    before = flat(model[1])
    optimizer.step()
    assert not torch.equal(flat(model[1]), before)
    fleet.stop_worker()


def served_alone() -> None:
    fleet.init()
    accumulated_after_minimize(tables=True)


def test_step_with_gradients_added_after_minimize_is_accepted() -> None:
    run_workers(accumulated_after_minimize, 1, False)
    run_processes(served_alone, [()])


def used_twice() -> None:
    model = fleet.distributed_model(network())
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = records()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.zero_grad()
    with pytest.raises(PlanError, match=r"call zero_grad\(\) before loss\.backward"):
        optimizer.minimize(loss)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    before = flat(model)
    with pytest.raises(PlanError, match="has stepped since the loss was computed"):
        optimizer.minimize(loss)
    assert torch.equal(before, flat(model))
    optimizer.zero_grad()
    optimizer.minimize(F.cross_entropy(model(x), y))
    assert not torch.equal(before, flat(model))


def orders(served: bool) -> list[list[float]]:
    """A weight after two steps, for losses with different calls of backward."""
    found = []
    for go_backward in BACKWARDS.values():
        if served:
            fleet.init()
        weight = nn.Linear(1, 1, bias=False)
        weight.weight.data.fill_(4.0)
        model = fleet.distributed_model(weight)
        optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(2):
            loss = model(torch.ones(1, 1)).sum()
            go_backward(loss)
            optimizer.minimize(loss)
            optimizer.zero_grad()
        found.append(weight.weight.flatten().tolist())
        if served:
            fleet.reset()
    return found


def scaled(loss: torch.Tensor) -> None:
    (loss / 1).backward(retain_graph=True)


#: the graph of the loss: retained, freed, left to `minimize`, part of another graph
BACKWARDS: dict[str, Any] = {
    "retained": lambda loss: loss.backward(retain_graph=True),
    "functional": lambda loss: torch.autograd.backward([loss], retain_graph=True),
    "gone": lambda loss: loss.backward(),
    "none": lambda loss: None,
    "not of parameters": lambda loss: torch.autograd.grad(loss, loss, retain_graph=True),
    "scaled": scaled,
}


@pytest.mark.parametrize("workers", [2, 1])
def test_retained_graph_goes_backward_once(workers: int) -> None:
    assert run_workers(orders, workers, False) == [[[3.0]] * len(BACKWARDS)] * workers


def test_retained_graph_goes_backward_once_with_servers() -> None:
    assert run_processes(orders, [(True,)]) == [[[3.0]] * len(BACKWARDS)]


def accumulated() -> list[float]:
    """`minimize` runs backward of its loss unless done; both losses count."""
    model = fleet.distributed_model(nn.Linear(1, 1, bias=False))
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    moves = []
    for retains in (False, True):
        before = model.weight.item()
        first, second = (model(torch.full((1, 1), x)).sum() for x in (1.0, 2.0))
        first.backward(retain_graph=retains)
        optimizer.minimize(second)
        optimizer.zero_grad()
        moves.append(round(before - model.weight.item(), 4))
    # a graph without saved tensors; no step came since its backward
    bare = model.weight.sum() + 0
    optimizer.step()
    before = model.weight.item()
    bare.backward()
    optimizer.minimize(bare)
    moves.append(round(before - model.weight.item(), 4))
    with pytest.raises(PlanError, match="has stepped since the loss was computed"):
        optimizer.minimize(bare)
    return moves


def test_minimize_of_a_second_loss_adds_its_gradient() -> None:
    assert run_workers(accumulated, 1) == [[3.0, 3.0, 1.0]]


@pytest.mark.parametrize("workers", [2, 1])
def test_loss_is_used_once(workers: int) -> None:
    run_workers(used_twice, workers)


def scaled_after_backward() -> None:
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "float16"})
    model = fleet.distributed_model(network().float())
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer: Any = fleet.distributed_optimizer(sgd, strategy)
    loss = F.cross_entropy(model(records()[0].float()), records()[1])
    loss.backward()
    with pytest.raises(PlanError, match=r"float16 .* remove loss\.backward\(\)"):
        optimizer.minimize(loss)


def test_minimize_with_a_scaler_refuses_a_loss_after_backward() -> None:
    run_workers(scaled_after_backward, 1)


def autocast(dtype: str) -> Any:
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": dtype})
    model = fleet.distributed_model(network().float())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
    kinds = []
    model[0].register_forward_hook(lambda m, a, out: kinds.append(str(out.dtype)))
    x, y = my_part(records()[0]).float(), my_part(records()[1])
    for _ in range(3):
        output = model(x)
        optimizer.minimize(F.cross_entropy(output, y))
        optimizer.zero_grad()
    return set(kinds), str(output.dtype), flat(model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_amp_applies_from_the_first_forward(dtype: str) -> None:
    results = run_workers(autocast, 2, dtype)
    for kinds, output, end in results:
        assert kinds == {f"torch.{dtype}"}
        assert output == "torch.float32"
        assert torch.equal(end, results[0][2])
        assert end.isfinite().all()
        assert not torch.equal(end.double(), flat(network()))


def infinite_on_one() -> Any:
    model = fleet.distributed_model(network().float())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = flat(model)
    loss = model(torch.ones(2, 6)).sum()
    if fleet.worker_index() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, flat(model)), scaler.get_scale()


def test_overflow_of_one_worker_skips_the_step_of_all() -> None:
    assert run_workers(infinite_on_one) == [(True, 2.0), (True, 2.0)]


def clipped() -> Any:
    model = fleet.distributed_model(network())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    F.cross_entropy(model(my_part(records()[0])) * 50, my_part(records()[1])).backward()
    norm = fleet.clip_grad_norm_(model, 0.5)
    optimizer.step()
    return float(norm), flat(model)


def test_clipping_sees_the_reduced_gradient() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    F.cross_entropy(model(records()[0]) * 50, records()[1]).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    for mine, end in run_workers(clipped):
        assert mine == pytest.approx(norm, abs=1e-12)
        torch.testing.assert_close(end, flat(model), rtol=0, atol=1e-12)


def recomputed() -> Any:
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"checkpoints": ["0"]})
    model = fleet.distributed_model(network())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: None)
    inner = model[0].weight.register_hook(lambda g: calls.append(1))
    F.cross_entropy(model(my_part(records()[0])), my_part(records()[1])).backward()
    inner.remove()
    optimizer.step()
    return flat(model), len(calls)


def test_recompute_changes_no_result() -> None:
    model = network()
    F.cross_entropy(model(records()[0]), records()[1]).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for result, _ in run_workers(recomputed):
        torch.testing.assert_close(result, flat(model), rtol=0, atol=1e-12)


def misuse() -> None:
    model = fleet.distributed_model(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fleet.distributed_optimizer(optimizer)
    with pytest.raises(PlanError, match="twice"):
        fleet.distributed_optimizer(optimizer)
    with pytest.raises(PlanError, match="twice"):
        fleet.distributed_model(model)
    with pytest.raises(PlanError, match=r"expected a torch\.optim\.Optimizer"):
        fleet.distributed_optimizer(model)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"expected a torch\.nn\.Module"):
        fleet.distributed_model(optimizer)  # type: ignore[type-var]
    with pytest.raises(PlanError, match="got the class Linear itself, expected"):
        fleet.distributed_model(nn.Linear)  # type: ignore[type-var]
    with pytest.raises(PlanError, match="got a int, expected the loss as a tensor"):
        optimizer.minimize(3)  # type: ignore[attr-defined]
    with pytest.raises(StrategyError, match=r"is a dict, .* with DistributedStrategy\(\*\*sett"):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters()), {"amp": True})  # type: ignore[arg-type]
    model(records()[0])
    late = torch.optim.SGD(model.parameters(), 0.1)
    strategy = fleet.DistributedStrategy(nccl_comm_num=2)
    with pytest.raises(StrategyError, match="after the first forward"):
        fleet.distributed_optimizer(late, strategy)


def test_misuse_is_refused() -> None:
    run_workers(misuse, 1)


# Gradient merge: k backwards make one step, however a script clears gradients.

PARTS, STEPS = 3, 2


def parts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This worker's batches of one merged step."""
    number, index = fleet.worker_num(), fleet.worker_index()
    return [
        (x.chunk(number)[index], y.chunk(number)[index])
        for x, y in zip(*(tensor.chunk(PARTS) for tensor in records()), strict=True)
    ]


def merging(**configs: Any) -> fleet.DistributedStrategy:
    configs = {"k_steps": PARTS, **configs}
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs=configs)


def train(model: nn.Module, optimizer: Any, clear: Callable[[], object]) -> torch.Tensor:
    for _ in range(STEPS):
        for x, y in parts():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            clear()
    return flat(model)


def plain(scale: float = 1.0) -> torch.Tensor:
    """One process that trains on all parts at once."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = records()
    for _ in range(STEPS):
        descend(optimizer, F.cross_entropy(model(x), y) * scale)
    return flat(model)


def merged(avg: bool, model_first: bool) -> Any:
    model = network()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    if model_first:
        model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer, merging(avg=avg))
    if not model_first:
        model = fleet.distributed_model(model)
    return train(model, optimizer, optimizer.zero_grad)


@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("avg", [True, False])
def test_three_backwards_make_one_step(workers: int, avg: bool) -> None:
    for result in run_workers(merged, workers, avg, workers == 1):
        torch.testing.assert_close(result, plain(1 if avg else PARTS), rtol=0, atol=1e-12)


def forget(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def cleared_in_every_way() -> list[torch.Tensor]:
    """A model for each way to drop gradients, trained one after the other."""
    results = []
    for way in (
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: [layer.zero_grad() for layer in model],
        forget,
        lambda model: None,
    ):
        model = fleet.distributed_model(network())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = fleet.distributed_optimizer(optimizer, merging() if not results else None)
        for _ in range(STEPS):
            for x, y in parts():
                # gradients of another loss are dropped, as without merging
                model(x).sum().backward()
                way(model)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                way(model)
            model.zero_grad()
        results.append(flat(model))
    return results


def test_clearing_gradients_loses_no_merged_part() -> None:
    for *cleared, kept in run_workers(cleared_in_every_way):
        for result in cleared:
            torch.testing.assert_close(result, plain(), rtol=0, atol=1e-12)
        assert not torch.allclose(kept, plain())


def set_late(scheduler_first: bool) -> Any:
    """The strategy changes after distributed_optimizer; schedulers come before or after."""
    model = fleet.distributed_model(network())
    strategy = fleet.DistributedStrategy()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    schedulers = []
    if scheduler_first:
        schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    strategy.gradient_merge = True
    strategy.gradient_merge_configs.k_steps = PARTS
    if not scheduler_first:
        schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))

    def clear() -> None:
        optimizer.zero_grad()
        schedulers[0].step()

    with warnings.catch_warnings():
        # torch warns of a scheduler that comes before the first step
        warnings.simplefilter("error")
        return train(model, optimizer, clear)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_strategy_is_read_when_training_begins(scheduler_first: bool) -> None:
    for result in run_workers(set_late, 2, scheduler_first):
        torch.testing.assert_close(result, plain(), rtol=0, atol=1e-12)


def two_optimizers() -> torch.Tensor:
    """Each steps one layer of a model; the last part uses only one of them."""
    strategy = merging()
    strategy.find_unused_parameters = True
    model = fleet.distributed_model(network())
    optimizers = [
        fleet.distributed_optimizer(torch.optim.Adam(model[i].parameters(), lr=0.01), strategy)
        for i in (0, 2)
    ]
    for _ in range(STEPS):
        for i, (x, y) in enumerate(parts()):
            hidden = model(x) if i < PARTS - 1 else model[2](model[0](x).relu().detach())
            F.cross_entropy(hidden, y).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    return flat(model)


def plain_without_the_last_part_of_a_layer() -> torch.Tensor:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(zip(*(t.chunk(PARTS) for t in records()), strict=True)):
            hidden = model[1](model[0](x))
            hidden = hidden if i < PARTS - 1 else hidden.detach()
            (F.cross_entropy(model[2](hidden), y) / PARTS).backward()
        optimizer.step()
    return flat(model)


def test_two_optimizers_and_a_part_that_skips_a_layer() -> None:
    expected = plain_without_the_last_part_of_a_layer()
    for result in run_workers(two_optimizers):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def clipped_and_merged() -> Any:
    model = fleet.distributed_model(network())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), merging())
    norms = []
    for x, y in parts():
        F.cross_entropy(model(x) * 50, y).backward()
        norms.append(float(fleet.clip_grad_norm_(model, 0.5)))
        optimizer.step()
        model.zero_grad()
    return norms, flat(model)


def test_clipping_sees_the_merged_gradient() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    F.cross_entropy(model(records()[0]) * 50, records()[1]).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    (norms, end), (others, _) = run_workers(clipped_and_merged)
    assert norms == others
    assert norms[-1] == pytest.approx(norm, abs=1e-12)
    torch.testing.assert_close(end, flat(model), rtol=0, atol=1e-12)


def overflow() -> Any:
    """The first part of the first step is infinite on one worker."""
    strategy = merging()
    strategy.amp = True
    strategy.amp_configs = {"dtype": "float16", "init_loss_scaling": 4.0}
    model = fleet.distributed_model(network().float())
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    ends = []
    for step in range(2):
        for part, (x, y) in enumerate(parts()):
            loss = F.cross_entropy(model(x.float()), y)
            if fleet.worker_index() == 1 and (step, part) == (0, 0):
                loss = loss * float("inf")
            optimizer.minimize(loss)
            optimizer.zero_grad()
        ends.append(flat(model))
    return ends


def test_skipped_step_drops_its_parts() -> None:
    model = network()
    F.cross_entropy(model(records()[0]), records()[1]).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for first, second in run_workers(overflow):
        assert torch.equal(first.double(), flat(network()))
        torch.testing.assert_close(second.double(), flat(model), rtol=0, atol=1e-3)


def refused() -> None:
    model = fleet.distributed_model(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(optimizer, merging())
    model(records()[0]).sum().backward()
    with pytest.raises(PlanError, match="a closure"):
        optimizer.step(lambda: 0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(records()[0]).sum()).backward()
    with pytest.raises(PlanError, match="a GradScaler"):
        scaler.step(optimizer)


def test_unsupported_merges_are_refused() -> None:
    run_workers(refused, 1)


# Two strategies in one job: a log line names the settings that differ.


def test_differences_are_named_with_both_values() -> None:
    one = DistributedStrategy(amp=True, a_sync_configs={"k_steps": 4})
    other = DistributedStrategy(amp=True, seed=3)
    assert differences(one, other) == ["a_sync_configs.k_steps = 4, now 0", "seed = 0, now 3"]
    assert differences(one, one) == []


def lines_of(given: list[dict[str, Any] | None]) -> Any:
    """The log lines for the strategies given to `fleet.init` and to each optimizer."""
    lines: list[str] = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    first, *others = [None if one is None else DistributedStrategy(**one) for one in given]
    fleet.init(is_collective=True, strategy=first)
    model = fleet.distributed_model(nn.Linear(1, 1))
    for strategy in others:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fleet.distributed_optimizer(optimizer, strategy)
    fleet.stop_worker()
    told = ("its strategy replaces", "takes effect only when given to")
    return [line for line in lines if any(words in line for words in told)]


def lines(*given: dict[str, Any] | None) -> list[str]:
    [found] = run_processes(lines_of, [(list(given),)])
    return list(found)


def test_different_second_strategy_is_logged() -> None:
    [line] = lines({"seed": 1}, {"seed": 2, "amp": True})
    assert "the one given to fleet.init, from which it differs" in line
    assert "amp = False, now True, seed = 1, now 2; give one strategy only" in line


def test_equal_or_single_strategies_are_not_logged() -> None:
    assert lines({"amp": True}, {"amp": True}) == []
    assert lines(None, {"amp": True}) == []
    assert lines({"amp": True}, None) == []


def test_different_strategies_of_two_optimizers_are_logged() -> None:
    [line] = lines(None, {"amp": True}, {"amp": True}, {})
    assert "the one given to an earlier fleet.distributed_optimizer" in line


def test_sinks_that_are_too_late_are_logged() -> None:
    [line] = lines(None, {"sinks": "tensorboard"})
    assert line.startswith("strategy.sinks = 'tensorboard' has no effect: it takes effect only")
    assert line.endswith("the job has no sinks")


@pytest.fixture
def alone() -> Iterator[None]:
    fleet.init()
    yield
    fleet.reset()


@pytest.mark.usefixtures("alone")
def test_repeated_attach_registers_once() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.amp.GradScaler("cpu")
    for _ in range(2):
        fleet.attach(scheduler=scheduler, scaler=scaler)
    assert current().schedulers.of([optimizer]) == [scheduler]
    assert current().scalers == [scaler]


@pytest.mark.usefixtures("alone")
def test_attach_checks_its_arguments() -> None:
    with pytest.raises(PlanError, match="got a SGD as scheduler, expected a torch"):
        fleet.attach(scheduler=torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="got nothing, expected scheduler="):
        fleet.attach()
