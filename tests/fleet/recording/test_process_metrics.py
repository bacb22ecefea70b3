# SPDX-License-Identifier: Apache-2.0
"""What worker 0 writes down of its job: the mode, the strategy, and the program that it trains."""

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.workers import run_processes
from torch import nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import PlanError

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def program_of(model: nn.Module) -> static.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(optimizer)
    inputs = {"x": torch.zeros(2, 4), "y": torch.zeros(2, 3)}
    return static.capture(fleet.distributed_model(model), F.mse_loss, optimizer, inputs)


def run(program: static.Program) -> None:
    feed = {"x": torch.ones(2, 4), "y": torch.ones(2, 3)}
    static.Executor().run(program, feed, ["loss"])


def described(folder: str) -> list[Any]:
    """What is written after the start, after the first program, and after another one."""
    path = Path(folder, "metrics", "job.json")

    def said() -> Any:
        fleet.barrier_worker()
        return json.loads(path.read_text()) if path.exists() else None

    if folder:
        os.environ["FLEET_LOG_DIR"] = folder
    fleet.init(is_collective=True)
    found = [said()]
    for model in (nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(4, 3)):
        program = program_of(model)
        run(program.clone(for_test=True))
        found.append(said())
        run(program)
        found.append(said())
    fleet.stop_worker()
    return found


def test_the_first_program_that_trains_is_drawn_once(tmp_path: Path) -> None:
    start, before, drawn, later, last = run_processes(described, [(str(tmp_path),)] * 2)[0]
    assert start["mode"] == "collective"
    assert start == before
    root = ElementTree.fromstring(drawn.pop("svg"))
    words = "".join(root.itertext())
    assert drawn == start, "the rest stays"
    assert "Training step of Sequential" in words
    assert "all-reduce" in words, "the program is drawn as it runs"
    assert later == last
    assert "Training step of Sequential" in later["svg"]


def test_nothing_is_drawn_without_a_log_folder(tmp_path: Path) -> None:
    assert run_processes(described, [("",)]) == [[None] * 5]


def refused(folder: str) -> Any:
    def broken(self: static.Program) -> None:
        raise PlanError("no picture today")

    static.Program.draw = broken  # type: ignore[method-assign,assignment]
    return described(folder)


def test_a_program_that_cannot_be_drawn_trains(tmp_path: Path) -> None:
    [found] = run_processes(refused, [(str(tmp_path),)])
    assert "svg" not in found[-1]
    assert found[-1] == found[0]


def described_later(folder: str) -> tuple[str, str]:
    """The mode and the strategy after one that is given with the optimizer."""
    for name in [one for one in os.environ if one.startswith("FLEET_")]:
        # one process without a launcher, and a server in it
        del os.environ[name]
    os.environ["FLEET_LOG_DIR"] = folder
    fleet.init()
    model = fleet.distributed_model(nn.Sequential(fleet.nn.SparseEmbedding(2), nn.Flatten()))
    strategy = fleet.DistributedStrategy(a_sync=True)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    found = json.loads(Path(folder, "metrics", "job.json").read_text())
    fleet.stop_worker()
    return found["mode"], found["explain"]


def test_a_strategy_of_the_optimizer_is_described(tmp_path: Path) -> None:
    [(mode, explain)] = run_processes(described_later, [(str(tmp_path),)])
    assert mode == "async"
    assert "* a_sync" in explain
