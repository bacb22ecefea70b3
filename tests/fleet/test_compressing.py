# SPDX-License-Identifier: Apache-2.0
"""Compression as a strategy asks for it: what is covered, and what is kept in checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight.errors import StrategyError
from fleetlight.fleet.context import current

pytestmark = pytest.mark.multiprocess


def prepared(**settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    model = fleet.distributed_model(plain)
    strategy = fleet.DistributedStrategy(shared_memory=False, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, fleet.distributed_optimizer(optimizer, strategy)


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + fleet.worker_index())
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(8) % 3).backward()
        optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def compressed(kind: str, **configs: Any) -> dict[str, Any]:
    return {"compression": kind, "compression_configs": {"min_size": 1, **configs}}


def coded_names(settings: dict[str, Any]) -> Any:
    model, optimizer = prepared(**settings)
    steps(model, optimizer, 0, 4)
    [compression] = current().compressions.values()
    return flat(model), sorted(compression.ledger.state())


@pytest.mark.parametrize(
    ("settings", "owed", "tolerance"),
    [
        (compressed("int8"), ["owed/0.weight", "owed/2.weight"], 5e-3),
        (compressed("topk", ratio=0.5), ["owed/0.weight", "owed/2.weight"], 0.2),
        (compressed("int8", exclude=["2"], error_feedback=False), [], 1e-2),
        (compressed("int8", min_size=40), ["owed/0.weight"], 5e-3),
    ],
    ids=["int8", "topk", "without_feedback", "min_size"],
)
def test_workers_are_equal_and_near_the_exact(
    settings: dict[str, Any], owed: list[str], tolerance: float
) -> None:
    [(exact, _), _] = run_workers(exactly)
    for end, names in run_workers(coded_names, 2, settings):
        assert names == owed
        assert not torch.equal(end, exact)
        torch.testing.assert_close(end, exact, rtol=0, atol=tolerance)


def exactly() -> Any:
    model, optimizer = prepared()
    steps(model, optimizer, 0, 4)
    assert not current().compressions
    return flat(model), None


def unknown_name() -> str:
    model, optimizer = prepared(**compressed("topk", exclude=["1.weight"]))
    with pytest.raises(StrategyError) as caught:
        steps(model, optimizer, 0, 1)
    return str(caught.value)


def test_an_excluded_name_must_be_one() -> None:
    for text in run_workers(unknown_name):
        assert text.startswith("exclude: the model has no parameter or module '1.weight'")


def save_and_go_on(folder: Path) -> torch.Tensor:
    model, optimizer = prepared(**compressed("topk", ratio=0.1))
    steps(model, optimizer, 0, 3)
    fleet.save_persistables(folder)
    steps(model, optimizer, 3, 6)
    return flat(model)


def load_and_go_on(folder: Path, drops: bool = False) -> tuple[torch.Tensor, list[str]]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    model, optimizer = prepared(**compressed("topk", ratio=0.1))
    fleet.load_persistables(folder)
    if drops:
        [compression] = current().compressions.values()
        compression.ledger.load({})
    steps(model, optimizer, 3, 6)
    return flat(model), [text for text in told if "dropped" in text]


def test_what_is_owed_is_in_the_checkpoint_of_as_many_workers(tmp_path: Path) -> None:
    went_on = run_workers(save_and_go_on, 2, tmp_path)[0]
    for end, told in run_workers(load_and_go_on, 2, tmp_path):
        assert torch.equal(end, went_on)
        assert told == []
    # it makes a difference
    assert not torch.equal(run_workers(load_and_go_on, 2, tmp_path, True)[0][0], went_on)
    # it is each worker's own
    first, *others = [told for _, told in run_workers(load_and_go_on, 3, tmp_path)]
    sentence = "what 2 workers had not sent of their gradients is dropped: this job has 3"
    assert first == [sentence]
    assert others == [[], []]
