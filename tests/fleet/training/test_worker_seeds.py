# SPDX-License-Identifier: Apache-2.0
"""Workers with equal seeds start from equal parameters but draw their own dropout masks."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import fleetlight as fleet
from fleetlight import static
from fleetlight.collective.group import Group
from fleetlight.fleet.collective.job import CollectiveJob
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.worker_seeds import derive_worker_seeds, derived_seed
from fleetlight.roles import Role
from fleetlight.strategy import DistributedStrategy

ONES = torch.ones(64)


def context_of(worker: int, **settings: Any) -> Job:
    role = Role(index=worker, worker_num=4)
    return CollectiveJob(role, Group(index=worker), DistributedStrategy(**settings))


def drawn_by(worker: int, seed: int = 0, **settings: Any) -> list[float]:
    torch.manual_seed(seed)
    derive_worker_seeds(context_of(worker, **settings))
    return torch.rand(4).tolist()


def test_workers_draw_distinct_numbers_and_worker_0_those_of_one_process() -> None:
    torch.manual_seed(0)
    alone = torch.rand(4).tolist()
    bound = [drawn_by(worker) for worker in range(4)]
    assert bound[0] == alone
    assert len({tuple(one) for one in bound}) == 4
    assert bound == [drawn_by(worker) for worker in range(4)]
    assert drawn_by(1, seed=1) != bound[1]


def test_setting_same_gives_equal_numbers() -> None:
    assert drawn_by(1, worker_seeds="same") == drawn_by(0)


def test_derived_seed_stays_until_the_script_seeds_again() -> None:
    context = context_of(1)
    torch.manual_seed(3)
    derive_worker_seeds(context)
    assert torch.initial_seed() == derived_seed(3, 1)
    first = torch.rand(2)
    state = torch.get_rng_state()
    derive_worker_seeds(context)
    second = torch.rand(2)
    assert not torch.equal(first, second)
    # a loaded generator state continues
    torch.manual_seed(99)
    torch.set_rng_state(state)
    derive_worker_seeds(context)
    assert torch.equal(torch.rand(2), second)
    torch.manual_seed(3)
    derive_worker_seeds(context)
    assert torch.equal(torch.rand(2), first)


@pytest.mark.parametrize("seed", [-1, 0, 2**64 - 1])
def test_any_torch_seed_can_be_derived(seed: int) -> None:
    torch.manual_seed(seed)
    derive_worker_seeds(context_of(1))
    assert torch.initial_seed() == derived_seed(seed % 2**64, 1)


def test_recomputed_forward_draws_the_same_numbers() -> None:
    """The first forward derives a seed; torch restores the script's seed before the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    plan = context_of(1).manage_model(model)
    x = torch.randn(4, 8)
    out = checkpoint(model, x, use_reentrant=False)
    out.pow(2).sum().backward()
    torch.manual_seed(0)
    plan.begin_forward()
    expected = model[1](nn.functional.linear(x, model[0].weight, model[0].bias))
    (gradient,) = torch.autograd.grad(expected.pow(2).sum(), [model[0].weight])
    assert torch.equal(out, expected)
    assert torch.equal(gradient, model[0].weight.grad)


def test_evaluation_changes_no_random_numbers() -> None:
    model = nn.Linear(2, 2)
    plan = context_of(1).manage_model(model)
    torch.manual_seed(5)
    model.eval()
    model(torch.ones(1, 2))
    assert torch.initial_seed() == 5
    plan.close()


class Augmented(Dataset[Tensor]):
    """Records with augmentation in the loading process."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)

    def __len__(self) -> int:
        return 8


def trained(worker_seeds: str) -> dict[str, Any]:
    strategy = fleet.DistributedStrategy(worker_seeds=worker_seeds)
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    loader = fleet.shard(DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1))
    augmented = torch.cat(list(loader)).flatten().tolist()
    first = model[0].weight.detach().clone()
    mask = model(torch.ones(64, 1)).eq(0)
    fleet.init_worker()
    torch.manual_seed(1)
    masks = [mask.tolist(), model(torch.ones(64, 1)).eq(0).tolist()]
    return {"first": first.tolist(), "masks": masks, "augmented": augmented}


@pytest.mark.multiprocess
def test_masks_and_augmentations_differ_and_first_values_do_not() -> None:
    zero, one = run_workers(trained, 2, "distinct")
    assert zero["first"] == one["first"]
    assert zero["augmented"] != one["augmented"]
    for mine, theirs in zip(zero["masks"], one["masks"], strict=True):
        assert mine != theirs


@pytest.mark.multiprocess
def test_strategy_can_make_masks_and_augmentations_equal() -> None:
    zero, one = run_workers(trained, 2, "same")
    assert zero == one


class FunctionalDropout(nn.Module):
    """Draws by a function, without a module of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Generator(nn.Module):
    """A model whose steps call its submodules, as in a Lightning module."""

    def __init__(self, drawing: nn.Module) -> None:
        super().__init__()
        self.encoder, self.drawing = nn.Linear(1, 1), drawing

    def training_step(self, x: Tensor) -> Tensor:
        mask: Tensor = self.drawing(x)
        return mask


def drawn_in_parts(drawing: nn.Module) -> list[Any]:
    torch.manual_seed(0)
    model = fleet.distributed_model(Generator(drawing))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    seeds = [torch.initial_seed()]
    for module in (model.eval(), copied.train(), pickled.train()):
        module.training_step(torch.ones(1, 64))
        seeds.append(torch.initial_seed())
    assert seeds == [0, 0, 0, 0]
    torch.manual_seed(0)
    mask = model.train().training_step(torch.ones(1, 64))
    assert not any(part._forward_pre_hooks for part in model.modules())
    return mask.eq(0).flatten().tolist()


@pytest.mark.multiprocess
@pytest.mark.parametrize("drawing", [nn.Dropout(0.5), FunctionalDropout()])
def test_submodule_called_directly_draws_distinct_numbers(drawing: nn.Module) -> None:
    zero, one = run_workers(drawn_in_parts, 2, drawing)
    assert any(zero)
    assert any(one)
    assert zero != one


def seeded_again() -> tuple[int, int]:
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    seeds = []
    for _ in range(2):
        torch.manual_seed(3)
        model[1](model[0](torch.ones(1, 2))).sum().backward()
        optimizer.step()
        seeds.append(torch.initial_seed())
    return seeds[0], seeds[1]


@pytest.mark.multiprocess
def test_step_derives_a_seed_at_the_latest() -> None:
    assert run_workers(seeded_again, 2) == [(3, 3), (derived_seed(3, 1),) * 2]


@pytest.mark.slow
def test_compiler_does_not_trace_the_seed_hook() -> None:
    torch.manual_seed(5)
    plan = context_of(1).manage_model(nn.Sequential(Generator(nn.Dropout(0.5)), nn.Dropout(0.5)))
    step = torch.compile(plan.module[1], backend="eager", fullgraph=True)
    torch.compiler.reset()
    step(torch.ones(2, 2))
    plan.close()
    assert not plan.module[1]._forward_pre_hooks


def run_program() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.0))
    inputs = {"x": ONES[None], "y": ONES[None]}
    program = static.capture(model, nn.functional.mse_loss, optimizer, inputs)
    torch.manual_seed(0)
    (loss,) = static.Executor("cpu").run(program, feed=inputs, fetch_list=["loss"])
    return float(loss)


@pytest.mark.multiprocess
def test_programs_of_workers_draw_distinct_numbers() -> None:
    zero, one = run_workers(run_program)
    assert zero != one
