# SPDX-License-Identifier: Apache-2.0
"""DGC in real jobs: steps as in the paper, refusals, and checkpoints."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.collective.codecs.paper import Paper
from tests.errors import error_text
from tests.workers import descend, run_workers
from torch import Tensor, nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.codecs.dgc import DGC as Codec
from fleetlight.collective.routes.route_segments import VELOCITY
from fleetlight.errors import PlanError
from fleetlight.fleet.job import current
from fleetlight.fleet.training.dgc import DeepCompression, check_optimizer

LR, STEPS = 0.1, 6
DGC = {"min_size": 1, "sparsity": [0.5]}
#: all options of SGD
RICH = {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def strategy(configs: dict[str, Any], **settings: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(
        **{"shared_memory": False, "dgc": True, "dgc_configs": {**DGC, **configs}, **settings}
    )


def prepared(configs: dict[str, Any], options: dict[str, Any], **settings: Any) -> tuple[Any, Any]:
    model = fleet.distributed_model(network())
    sgd = torch.optim.SGD(model.parameters(), LR, **{"momentum": 0.9, **options})
    return model, fleet.distributed_optimizer(sgd, strategy(configs, **settings))


def loss_of(model: nn.Module, batch: int, worker: int) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * batch + worker))
    return F.cross_entropy(model(x), torch.arange(8) % 3)


def steps(model: nn.Module, optimizer: Any, first: int = 0, last: int = STEPS) -> None:
    for number in range(first, last):
        descend(optimizer, loss_of(model, number, fleet.worker_index()))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def simulated(
    workers: int, levels: list[float | None], options: dict[str, Any], merged: int = 1
) -> Tensor:
    """A simulation in one process: a sparsity for each step, None for a dense step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), LR, **{"momentum": 0.9, **options})
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    papers = {
        n: Paper(_double(p), workers, lr=LR, **{"momentum": 0.9, **options})
        for n, p in weights.items()
    }
    for number, (before, level) in enumerate(itertools.pairwise([1.0, *levels])):
        each = [_gradients(model, number, worker, merged) for worker in range(workers)]
        for name, p in model.named_parameters():
            p.grad = torch.stack([grads[name] for grads in each]).mean(0)
        for name, paper in papers.items():
            if level is not None and before is None:
                paper.weight = _double(weights[name])
                paper.begin(_double(optimizer.state[weights[name]]["momentum_buffer"]))
        optimizer.step()
        if level is not None:
            for name, paper in papers.items():
                paper.step(np.array([_double(g[name]) / workers for g in each]), level)
                weights[name].data.copy_(torch.from_numpy(paper.weight).view_as(weights[name]))
    return flat(model)


def _gradients(model: nn.Module, number: int, worker: int, merged: int) -> dict[str, Tensor]:
    model.zero_grad()
    for part in range(merged):
        (loss_of(model, number * merged + part, worker) / merged).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _double(tensor: Tensor) -> Any:
    return tensor.detach().double().reshape(-1).numpy().copy()


def trained(configs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    model, optimizer = prepared(configs, options)
    steps(model, optimizer)
    return flat(model)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("workers", "configs", "levels", "options"),
    [
        (2, {}, [0.5] * 6, {}),
        (
            3,
            {"rampup_begin_step": 2, "rampup_step": 2, "sparsity": [0.5, 0.8]},
            [None, None, 0.5, 0.8, 0.8, 0.8],
            RICH,
        ),
    ],
    ids=["at_once", "later"],
)
def test_workers_are_equal_and_step_as_in_the_paper(
    workers: int, configs: dict[str, Any], levels: list[float | None], options: dict[str, Any]
) -> None:
    results = run_workers(trained, workers, configs, options)
    expected = simulated(workers, levels, options)
    for end in results:
        assert torch.equal(end, results[0])
        torch.testing.assert_close(end, expected, rtol=1e-4, atol=1e-5)


def merged() -> Tensor:
    settings = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    model, optimizer = prepared({"rampup_begin_step": 2}, RICH, **settings)
    steps(model, optimizer, 0, 2 * 4)
    return flat(model)


def closures() -> Tensor:
    model, optimizer = prepared({"rampup_begin_step": 2}, RICH)
    for number in range(4):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number, fleet.worker_index())
            loss.backward()
            return loss

        optimizer.step(closure)
    return flat(model)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("way", "parts"), [(merged, 2), (closures, 1)], ids=["merged", "closure"])
def test_dgc_step_is_an_optimizer_step(way: Callable[[], Tensor], parts: int) -> None:
    expected = simulated(2, [None, None, 0.5, 0.5], RICH, parts)
    for end in run_workers(way):
        torch.testing.assert_close(end, expected, rtol=1e-4, atol=1e-5)


def grown() -> tuple[Tensor, Tensor, float]:
    """A layer trains from the third step on, in its own param group."""
    model = fleet.distributed_model(network().requires_grad_(False))
    model[0].requires_grad_()
    sgd = torch.optim.SGD(model[0].parameters(), LR, momentum=0.9)
    optimizer = fleet.distributed_optimizer(
        sgd, strategy({"sparsity": [0.0], "factor_masking": False})
    )
    for number in range(STEPS):
        if number == 2:
            model[2].requires_grad_()
            optimizer.add_param_group({"params": model[2].parameters(), "momentum": 0.5})
        steps(model, optimizer, number, number + 1)
    [compression] = current().compressions.values()
    assert isinstance(compression, DeepCompression)
    return flat(model), _grown_alone(), compression.momentum_of("2.weight").factor


def _grown_alone() -> Tensor:
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), LR, momentum=0.9)
    for number in range(STEPS):
        if number == 2:
            optimizer.add_param_group({"params": model[2].parameters(), "momentum": 0.5})
        optimizer.zero_grad()
        model.zero_grad()
        (sum(loss_of(model, number, worker) for worker in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    return flat(model)


@pytest.mark.multiprocess
def test_param_groups_may_be_added_during_training() -> None:
    for end, expected, factor in run_workers(grown):
        torch.testing.assert_close(end, expected, rtol=1e-4, atol=1e-5)
        assert factor == 0.5


def save_and_continue(folder: Path) -> Tensor:
    model, optimizer = prepared(LATER, RICH)
    steps(model, optimizer, 0, 4)
    fleet.save_persistables(folder)
    steps(model, optimizer, 4, 8)
    return flat(model)


def load_and_continue(folder: Path) -> Tensor:
    model, optimizer = prepared(LATER, RICH)
    fleet.load_persistables(folder)
    steps(model, optimizer, 4, 8)
    return flat(model)


#: the checkpoint falls into the ramp-up of the sparsity
LATER = {"rampup_begin_step": 2, "rampup_step": 4, "sparsity": [0.5, 0.9]}


@pytest.mark.multiprocess
def test_dgc_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    continued = run_workers(save_and_continue, 2, tmp_path)
    for end in run_workers(load_and_continue, 2, tmp_path):
        assert torch.equal(end, continued[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 0.0}, r"momentum=0\.0, expected momentum above 0"),
        ({"dampening": 0.5}, r"group 0 .* has dampening=0\.5, expected"),
        ({"maximize": True, "momentum": 0.0}, r"momentum=0\.0, maximize=True, expected"),
    ],
    ids=["no_momentum", "dampening", "maximize"],
)
def test_unsupported_momentum_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_optimizer(torch.optim.SGD([torch.zeros(1)], LR, **{"momentum": 0.9, **options}))


def alone(step: int, configs: dict[str, Any]) -> tuple[nn.Sequential, Any, DeepCompression]:
    """A model, its optimizer and its compression, without a job."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    plans = [SimpleNamespace(optimizer=sgd)]
    context: Any = SimpleNamespace(strategy=strategy(configs), step=step, optimizers=plans)
    return model, sgd, DeepCompression(context, model)


@pytest.mark.parametrize("step", [2, 5], ids=["at_the_beginning", "later"])
def test_optimizer_momentum_is_used_until_velocity_exists(step: int) -> None:
    _, _, compression = alone(step, {"rampup_begin_step": 2})
    codec = compression.codec
    assert isinstance(codec, Codec)
    assert compression.prepare()
    assert codec.is_first
    # checked once a step, whatever the first bucket leaves
    compression.residuals.of(VELOCITY, (ParameterSlice("0.weight", 72),))
    assert codec.is_first
    assert compression.prepare()
    assert not codec.is_first
    # a loaded state may have no velocity
    compression.residuals.load({"owed/0.weight": torch.ones(72)})
    assert compression.prepare()
    assert codec.is_first
    assert not alone(1, {"rampup_begin_step": 2})[2].prepare()


def test_optimizer_of_each_parameter_is_found_before_each_step() -> None:
    model, sgd, compression = alone(0, {})
    [group] = sgd.param_groups
    moved = [group["params"].pop() for _ in range(2)]
    assert compression.prepare()
    assert [compression.momentum_of(n).factor for n in ("0.weight", "2.weight")] == [0.9, 0]
    # the number of groups is unchanged
    group["params"] += moved
    model[0].weight = nn.Parameter(torch.ones(12, 6))
    group["params"][0] = model[0].weight
    assert compression.prepare()
    for name, layer in (("0.weight", model[0]), ("2.weight", model[2])):
        assert compression.momentum_of(name).factor == 0.9
        assert compression.momentum_of(name).parameter is layer.weight


def test_parameter_added_to_an_optimizer_within_a_step_is_refused() -> None:
    model, sgd, compression = alone(0, {})
    sgd.param_groups[0]["params"].pop(2)
    assert compression.prepare()
    means = {"2.weight": torch.zeros(3, 12)}
    compression.correct(means)
    sgd.add_param_group({"params": [model[2].weight]})
    with pytest.raises(PlanError, match=r"the parameter 2\.weight was added to an optimizer while"):
        compression.correct(means)


def test_message_bytes_are_those_of_the_final_sparsity() -> None:
    _, _, compression = alone(0, {"sparsity": [0.5, 0.99]})
    assert compression.prepare()
    # 1 % of the values, each with its index
    assert compression.message_bytes(1000) == 10 * 8


def reduced_twice() -> Iterator[str]:
    model, optimizer = prepared({}, {})
    with fleet.no_sync():
        loss_of(model, 0, fleet.worker_index()).backward()
    steps(model, optimizer, 1, 2)
    loss_of(model, 2, fleet.worker_index()).backward()
    yield error_text(PlanError, fleet.clip_grad_norm_, model, 1.0)
    yield error_text(PlanError, loss_of(model, 3, fleet.worker_index()).backward)


def registered_late() -> Iterator[str]:
    model, optimizer = prepared({}, {})
    steps(model, optimizer, 0, 1)
    fleet.distributed_optimizer(torch.optim.Adam(network().parameters()))
    yield error_text(PlanError, steps, model, optimizer, 1, 2)


def texts_of(mistake: Callable[[], Iterator[str]]) -> list[str]:
    return list(mistake())


@pytest.mark.multiprocess
def test_second_reduction_in_a_step_and_clipping_are_refused() -> None:
    for clipped, twice in run_workers(texts_of, 2, reduced_twice):
        assert clipped.startswith("fleet.clip_grad_norm_: with strategy.dgc")
        assert "dgc_configs.local_grad_clip_norm" in clipped
        assert "reduced twice for one step" in twice
        assert "fleet.no_sync()" in twice
        assert "to skip a step, decide so before" in twice


@pytest.mark.multiprocess
def test_optimizer_registered_later_is_checked() -> None:
    for [adam] in run_workers(texts_of, 2, registered_late):
        assert adam.startswith("strategy.dgc: got the optimizer torch.optim.adam.Adam, expected")
        assert "compression='topk'" in adam


def adam(shared_memory: bool) -> tuple[list[str], Tensor | str]:
    model = fleet.distributed_model(network())
    sparse = strategy({}, shared_memory=shared_memory)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), sparse)
    lines = [line for line in str(current().strategy.explain()).splitlines() if "dgc" in line]
    try:
        steps(model, optimizer)
        fleet.clip_grad_norm_(model, 1.0)
    except PlanError as error:
        return lines, str(error)
    return lines, flat(model)


@pytest.mark.multiprocess
def test_dgc_on_one_host_does_nothing_and_says_so() -> None:
    (lines, end), (_, other) = run_workers(adam, 2, True)
    assert isinstance(end, Tensor)
    assert torch.equal(end, other)
    assert any("no gradient crosses a link" in line for line in lines)
    for lines, error in run_workers(adam, 2, False):
        assert "expected torch.optim.SGD" in error
        assert any("the largest 50" in line for line in lines)
