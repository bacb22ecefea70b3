# SPDX-License-Identifier: Apache-2.0
"""Coded gradients: all workers step equally, and the residual is kept."""

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.collective.rounding import rounded
from tests.workers import run_processes, run_workers
from torch import nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight.collective.codecs.compression import Compression
from fleetlight.fleet.job import current
from fleetlight.fleet.training import model as registered

pytestmark = pytest.mark.multiprocess

STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def records() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 6, generator=generator), torch.randint(0, 3, (24,), generator=generator)


def whole(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    F.cross_entropy(model(x), y).backward()


def parts_alone(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    # late gradients fill other buckets than backward does
    forward = model if step % 2 else lambda x: model[2](model[1](model[0](x)))
    F.cross_entropy(forward(x), y).backward()


def accumulated(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    for scale in (1, 2):
        F.cross_entropy(model(scale * x), y).backward()


def frozen(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    model[0].weight.requires_grad_(step != 2)
    F.cross_entropy(model(x), y).backward()


Way = Callable[[nn.Sequential, torch.Tensor, torch.Tensor, int], None]
WAYS: dict[str, Way] = {f.__name__: f for f in (whole, parts_alone, accumulated, frozen)}


def use_rounding_codec() -> Compression:
    """Makes all models of this process use this codec."""
    compression = rounded()
    registered.compression_of = lambda context, module: compression  # type: ignore[assignment]
    return compression


def train(way: str, settings: dict[str, Any], host: str | None = None) -> Any:
    """The final model, and the parameters that have a residual."""
    if host is not None:
        os.environ["FLEET_HOST"] = host
        fleet.init(is_collective=True)
    compression = use_rounding_codec()
    model = fleet.distributed_model(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(**settings))
    x, y = (t.chunk(fleet.worker_num())[fleet.worker_index()] for t in records())
    steps(WAYS[way], model, optimizer, x, y)
    return flat(model), set(compression.residuals.state())


def plain(way: str) -> torch.Tensor:
    model = network()
    steps(WAYS[way], model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), *records())
    return flat(model)


def steps(way: Way, model: nn.Sequential, optimizer: Any, *batch: torch.Tensor) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        way(model, *batch, step)
        optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


#: biases are not coded
WEIGHTS = {"owed/0.weight", "owed/2.weight"}


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        ("whole", {"fuse_all_reduce_ops": False, "nccl_comm_num": 2}),
        ("parts_alone", {}),
        ("accumulated", {}),
        ("frozen", {}),
    ],
    ids=["not_fused", "parts_alone", "accumulated", "frozen"],
)
def test_coded_workers_nearly_equal_one_process(way: str, settings: dict[str, Any]) -> None:
    results = run_workers(train, 2, way, {"shared_memory": False, **settings})
    for end, kept in results:
        assert torch.equal(end, results[0][0])
        torch.testing.assert_close(end, plain(way), rtol=0, atol=5e-3)
        assert kept == WEIGHTS


def test_among_three_workers_sums_are_coded_again() -> None:
    results = run_workers(train, 3, "whole", {"shared_memory": False})
    for end, kept in results:
        assert torch.equal(end, results[0][0])
        torch.testing.assert_close(end, plain("whole"), rtol=0, atol=5e-3)
        assert kept == WEIGHTS | {"owed again/0.weight", "owed again/2.weight"}


def test_gradients_inside_a_host_are_not_coded() -> None:
    settings = {"use_hierarchical_allreduce": True}
    hosts = ["127.0.0.1", "127.0.0.2"] * 2
    results = run_processes(train, [("whole", settings, host) for host in hosts])
    for end, _ in results:
        assert torch.equal(end, results[0][0])
        torch.testing.assert_close(end, plain("whole"), rtol=0, atol=5e-3)
    # only the leaders send, and have residuals
    assert [kept for _, kept in results] == [WEIGHTS, WEIGHTS, set(), set()]


def test_gradients_in_shared_memory_are_not_coded() -> None:
    for end, kept in run_workers(train, 2, "whole", {}):
        torch.testing.assert_close(end, plain("whole"), rtol=0, atol=1e-6)
        assert not kept


def warnings_about_uncoded() -> list[str]:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    use_rounding_codec()
    module = nn.ModuleDict(
        {"ids": nn.Embedding(9, 4, sparse=True), "wide": nn.Linear(4, 3).double()}
    )
    fleet.distributed_model(module)
    fleet.distributed_optimizer(
        torch.optim.SGD(module.parameters(), 0.1), fleet.DistributedStrategy(shared_memory=False)
    )
    current().models[0].freeze()
    return [text for text in records if "travel as they are" in text]


def test_the_first_uncoded_parameter_is_named_once() -> None:
    first, second = run_workers(warnings_about_uncoded)
    assert second == []
    assert first == [
        "rounding takes dense gradients of float32; of those that are large enough 2 will travel "
        "as they are, such as that of ids.weight, which is sparse"
    ]
