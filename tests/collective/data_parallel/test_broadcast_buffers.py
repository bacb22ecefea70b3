# SPDX-License-Identifier: Apache-2.0
"""Buffers of any layout are broadcast from worker 0, unless the strategy disables it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.served import Member, Net, run
from tests.workers import run_workers
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.collective.data_parallel.consistency import check_buffers
from fleetlight.errors import PlanError


def views(first: float) -> dict[str, Tensor]:
    return {
        "whole": torch.arange(4.0) + first,
        "expanded": (torch.arange(4.0) + first).expand(3, 4),
        "scalar": torch.tensor(first).expand(5),
        # as tutorials lay out positional encodings
        "permuted": (torch.arange(12.0) + first).view(1, 3, 4).transpose(0, 1),
        "both": (torch.arange(4.0) + first).expand(3, 4).t(),
        "overlapping": (torch.arange(6.0) + first).unfold(0, 3, 1),
        "sliced": (torch.arange(12.0) + first)[::2],
        "empty": torch.empty(0),
    }


def with_views(model: nn.Module, first: float) -> nn.Module:
    for name, view in views(first).items():
        model.register_buffer(name, view)
    return model


def buffers_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in model.named_buffers()}


def buffers_after_steps(shares: bool, folder: str) -> Any:
    strategy = fleet.DistributedStrategy(broadcast_buffers=shares)
    first = float(fleet.worker_index())
    model = fleet.distributed_model(with_views(nn.Linear(2, 1), first))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(sgd, strategy)
    seen = []
    for step in range(2):
        # changed since the last forward
        model.get_buffer("whole").add_(100.0 * step * first)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        seen.append(buffers_of(model))
    fleet.save_persistables(folder)
    model.get_buffer("scalar")[:1].zero_()
    fleet.load_persistables(folder)
    return seen, buffers_of(model)


def expected(first: float) -> dict[str, list[float]]:
    return {name: view.flatten().tolist() for name, view in views(first).items()}


@pytest.mark.multiprocess
def test_all_workers_get_the_buffers_of_worker_0(tmp_path: Path) -> None:
    for seen, loaded in run_workers(buffers_after_steps, 2, True, str(tmp_path / "ckpt")):
        assert seen == [expected(0.0)] * 2
        assert loaded == expected(0.0)


@pytest.mark.multiprocess
def test_broadcast_buffers_false_keeps_local_buffers(tmp_path: Path) -> None:
    [zero, _], [one, _] = run_workers(buffers_after_steps, 2, False, str(tmp_path / "ckpt"))
    assert zero == [expected(0.0)] * 2
    assert one[0] == expected(1.0)
    assert one[1] == {**expected(1.0), "whole": [101.0, 102.0, 103.0, 104.0]}


@pytest.mark.parametrize("shares", [True, False])
def test_workers_of_servers_follow_broadcast_buffers(shares: bool) -> None:
    numbers = itertools.count()

    def build() -> Any:
        model = with_views(Net(), float(next(numbers)))
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def train(worker: Member) -> Any:
        return buffers_of(worker.model)

    zero, one = run(build, train, {"broadcast_buffers": shares})
    assert (zero == one) is shares


@pytest.mark.parametrize(
    ("buffer", "what"),
    [
        (torch.eye(3).to_sparse(), "of layout sparse_coo"),
        (torch.inference_mode()(torch.ones)(3), r"made under torch.inference_mode\(\)"),
    ],
)
def test_a_buffer_that_cannot_be_written_is_named(buffer: Tensor, what: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("mask", buffer)
    with pytest.raises(PlanError, match=rf"buffer 0.mask of the model is {what}, .*broadcast_buff"):
        check_buffers(model)
