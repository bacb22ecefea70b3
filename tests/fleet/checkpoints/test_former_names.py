# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that use the names older versions gave to modules of a program."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workers import run_job, run_workers
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import CheckpointError

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Its method writes the program, and calls modules in another order than it defines them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 1)
        self.body = nn.Linear(3, width)

    def net(self) -> Tensor:
        out: Tensor = self.head(self.body(static.data("x", [None, 3]))) * self.scale
        return out.square().mean()


def numbered(**parts: nn.Module) -> nn.Module:
    """The names of an older version: modules numbered in the order of their calls."""
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def former(body: str = "linear_0") -> nn.Module:
    torch.manual_seed(2)
    model = numbered(**{body: nn.Linear(3, 4)}, linear_1=nn.Linear(4, 1))
    model.parameter_0 = nn.Parameter(torch.full((1,), 3.0))
    return model


def save(folder: str, body: str) -> None:
    model = fleet.distributed_model(former(body))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    fleet.save_persistables(folder)


def load(folder: str, width: int) -> dict[str, Any]:
    model = Net(width)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    optimizer.minimize(model.net())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        fleet.load_persistables(folder)
    except CheckpointError as error:
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
        return {"error": str(error)}
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept = {
        names[p]: float(one["momentum_buffer"].flatten()[0]) for p, one in optimizer.state.items()
    }
    return {"values": {n: t.tolist() for n, t in model.state_dict().items()}, "kept": kept}


@pytest.mark.multiprocess
def test_values_and_optimizer_state_load_under_present_names(tmp_path: Path) -> None:
    run_workers(save, 1, str(tmp_path / "saved"), "linear_0")
    found = run_workers(load, 2, str(tmp_path / "saved"), 4)
    old = former()
    now = {"scale": "parameter_0", "head": "linear_1", "body": "linear_0"}
    values = {name: tensor.tolist() for name, tensor in old.state_dict().items()}
    numbers = {name: float(n) for n, (name, _) in enumerate(old.named_parameters())}
    for one in found:
        for name in one["values"]:
            first, dot, rest = name.partition(".")
            assert one["values"][name] == values[now[first] + dot + rest]
            assert one["kept"][name] == numbers[now[first] + dot + rest]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("body", "width", "message"),
    [
        ("linear_7", 4, "'scale' is not in the checkpoint"),
        ("linear_0", 5, "'head.weight' is float32[1, 5] here, but float32[1, 4]"),
    ],
)
def test_other_modules_and_other_shapes_are_refused(
    body: str, width: int, message: str, tmp_path: Path
) -> None:
    run_workers(save, 1, str(tmp_path / "saved"), body)
    [found] = run_workers(load, 1, str(tmp_path / "saved"), width)
    assert message in found["error"]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)
        self.rows = fleet.nn.SparseEmbedding(2)

    def net(self) -> Tensor:
        out: Tensor = self.head(self.rows(static.data("ids", [None], "int64")))
        return out.square().mean()


IDS = torch.arange(4)


def save_rows(place: str) -> list[float]:
    rows, head = fleet.nn.SparseEmbedding(2), nn.Linear(2, 1)
    model = fleet.distributed_model(numbered(sparseembedding_0=rows, linear_1=head))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    fleet.init_worker()
    head(rows(IDS)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        found: list[float] = head(rows(IDS)).flatten().tolist()
    fleet.save_persistables(place)
    fleet.stop_worker()
    return found


def resume_job(place: str, in_server: bool) -> list[float]:
    model = Deep()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    optimizer.minimize(model.net())
    if fleet.is_server():
        fleet.init_server(place if in_server else None)
        fleet.run_server()
        return []
    executor = static.Executor("cpu")
    executor.run(static.default_startup_program())
    fleet.init_worker()
    if not in_server:
        fleet.load_persistables(place)
    with torch.no_grad():
        found: list[float] = model.head(model.rows(IDS)).flatten().tolist()
    fleet.stop_worker()
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("in_server", [True, False])
def test_workers_and_servers_find_tables_under_former_names(
    in_server: bool, tmp_path: Path
) -> None:
    save = functools.partial(save_rows, str(tmp_path / "saved"))
    [(_, expected)] = run_job(save, save, servers=0, workers=1)
    work = functools.partial(resume_job, str(tmp_path / "saved"), in_server)
    answers = run_job(work, work, servers=2, workers=1)
    assert [kind for kind, _ in answers] == ["value"] * 3, answers
    assert answers[-1][1] == pytest.approx(expected)
