# SPDX-License-Identifier: Apache-2.0
"""Programs train as the eager loop does: hierarchical, with codecs, or with local SGD."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fleet.collective.test_programs import (
    captured,
    captured_on,
    eager,
    example,
    network,
    prepared,
    records,
    state_of,
)
from tests.workers import run_workers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess


def common_state(train: Any, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The state after a training; all workers must have the same."""
    train(settings)
    fleet.barrier_worker()
    return state_of(current().models[0].module)


@pytest.mark.parametrize("shared", [True, False], ids=["in-memory", "by-gloo"])
def test_hierarchical_all_reduce_equals_the_eager_loop(shared: bool) -> None:
    settings = {
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
        "shared_memory": shared,
    }
    # 23 records: the last block has some for each of the four workers
    expected = run_workers(eager, 4, settings, 0, 3)
    found = run_workers(captured, 4, settings, 0, 3)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    for name, _ in network().named_parameters():
        assert all(torch.equal(found[0][name], other[name]) for other in found)


# k_steps does not divide the six steps, so the last average comes early
ALONE: dict[str, dict[str, Any]] = {
    "localsgd": {
        "localsgd": True,
        "localsgd_configs": {"k_steps": 2, "begin_step": 1, "optimizer_state": "reset"},
    },
    "adaptive": {
        "adaptive_localsgd": True,
        "adaptive_localsgd_configs": {
            "init_k_steps": 2,
            "begin_step": 0,
            "optimizer_state": "average",
            "buffers": "rank0",
        },
    },
    "diloco": {"diloco": True, "diloco_configs": {"k_steps": 4, "begin_step": 0}},
}


@pytest.mark.parametrize("mode", ALONE)
def test_local_training_equals_the_eager_loop(mode: str) -> None:
    expected, _ = run_workers(common_state, 2, eager, ALONE[mode])
    found, other = run_workers(common_state, 2, captured, ALONE[mode])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for name, value in found.items():
        assert torch.equal(value, other[name]), name


def float32_records() -> Any:
    """Codecs take float32."""
    x, y = records().tensors
    return fleet.shard(DataLoader(TensorDataset(x.float(), y), 4, shuffle=True))


def coded_network(settings: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fleet.distributed_model(network().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    strategy = fleet.DistributedStrategy(shared_memory=False, **settings)
    return model, fleet.distributed_optimizer(optimizer, strategy)


def coded_eager(settings: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = coded_network(settings)
    for _ in range(2):
        for x, y in float32_records():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model)


def coded_program(settings: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    model, optimizer = coded_network(settings)
    example = {"x": torch.zeros(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    program = static.capture(model, F.cross_entropy, optimizer, example)
    executor = static.Executor()
    for _ in range(2):
        for x, y in float32_records():
            executor.run(program, {"x": x, "y": y})
    return state_of(model), program.explain()


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "topk", "compression_configs": {"ratio": 0.2, "min_size": 1}},
        {"compression": "int8", "compression_configs": {"min_size": 1}},
        {
            "dgc": True,
            "dgc_configs": {
                "min_size": 1,
                "sparsity": [0.5, 0.8],
                "rampup_begin_step": 2,
                "rampup_step": 4,
            },
        },
    ],
    ids=["topk", "int8", "dgc"],
)
def test_codecs_equal_the_eager_loop(settings: dict[str, Any]) -> None:
    plain, _ = run_workers(coded_eager, 2, {})
    expected, _ = run_workers(coded_eager, 2, settings)
    (found, explanation), (other, _) = run_workers(coded_program, 2, settings)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found["0.weight"] - plain["0.weight"]).abs().max() > 1e-4
    assert torch.equal(found["0.weight"], other["0.weight"])
    assert "2 of 6 gradients travel as" in explanation


def clipped() -> None:
    settings = {"dgc": True, "dgc_configs": {"min_size": 1}}
    model, optimizer = coded_network(settings)
    example = {"x": torch.zeros(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(PlanError, match=r"local_grad_clip_norm, which clips what a worker sends"):
        static.capture(model, F.cross_entropy, optimizer, example, clip_norm=1.0)


def test_clipping_with_dgc_is_refused() -> None:
    run_workers(clipped, 2)


LOCAL: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 0}}


def saving(folder: str) -> dict[str, Tensor]:
    """Three steps, a checkpoint between two averages, and three more steps."""
    model, optimizer, loader = prepared(fleet.DistributedStrategy(**LOCAL))
    program = static.capture(model, F.cross_entropy, optimizer, example())
    captured_on(program, loader, model)
    fleet.save_persistables(folder)
    return captured_on(program, loader, model)


def resuming(folder: str) -> dict[str, Tensor]:
    model, optimizer, loader = prepared(fleet.DistributedStrategy(**LOCAL), seed=5)
    program = static.capture(model, F.cross_entropy, optimizer, example())
    fleet.load_persistables(folder)
    return captured_on(program, loader, model)


def test_local_training_of_a_program_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    expected, found = run_workers(saving, 2, folder), run_workers(resuming, 2, folder)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    # both trained alone when they ended
    assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"])
