# SPDX-License-Identifier: Apache-2.0
"""The static examples compute what their eager twins compute."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from tests.examples.running import EXAMPLES, FLEETRUN, ended, numbers, run, start

import fleetlight as fleet

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

SERVED = [sys.executable, "-m", "fleetlight.launch", "--server_num", "2", "--worker_num", "2"]
CLICKS = ["--samples", "2048", "--test", "2000", "--batch", "64", "--show_every", "1"]


def both(command: list[str], folder: str, *arguments: object) -> tuple[str, str]:
    """The output of the eager script and of the static one, with equal arguments."""
    scripts = [EXAMPLES / folder / f"train_{kind}.py" for kind in ("fleet", "static")]
    eager, static = [start(*command, script, *arguments) for script in scripts]
    return ended(eager), ended(static)


def test_mnist_mlp_with_two_workers_equals_its_eager_twin() -> None:
    arguments = ["--limit", 1000, "--batch", 32, "--epochs", 2, "--show_every", 5]
    eager, static = both(FLEETRUN, "mnist_mlp", *arguments, "--out", "out")
    for pattern in (r"loss (\S+)", r"acc (\S+)", r"test accuracy (\S+),"):
        assert numbers(pattern, static) == pytest.approx(numbers(pattern, eager), abs=1e-4)
    assert "all_reduce: 6 -> 1 (25 MiB)" in static
    assert Path("out/checkpoint/manifest.json").is_file()
    model = fleet.load_inference_model("out/inference")
    assert model(torch.zeros(5, 1, 28, 28)).shape == (5, 10)


def test_resnet50_with_two_workers_reports_fusion() -> None:
    arguments = ["--limit", 16, "--batch", 2, "--size", 32, "--epochs", 1, "--no-augment"]
    output = run(*FLEETRUN, EXAMPLES / "resnet50/train_static.py", *arguments)
    assert "all_reduce: 161 -> 5 (25 MiB)" in output
    assert "4 of 5 all-reduces begin before backward ends" in output
    report = r"^\[Epoch 0, batch (\d)\] loss: \d+\.\d{5}, acc1: [01]\.\d{5}, acc5: [01]\.\d{5}$"
    assert re.findall(report, output, re.MULTILINE) == ["0"]


def test_random_mlp_alone_fetches_every_second_cost() -> None:
    arguments = ["--rows", 256, "--batch", 32, "--size", 64]
    eager, static = both([sys.executable], "random_mlp", *arguments)
    costs = numbers(r"cost (\S+)", static)
    assert costs == pytest.approx(numbers(r"cost (\S+)", eager), abs=2e-6)
    assert len(costs) == 4


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_wide_deep_alone_equals_its_eager_twin(mode: str) -> None:
    eager, static = both([sys.executable], "wide_deep", *CLICKS, "--mode", mode)
    losses = numbers(r"loss (\S+)", static)
    assert losses == pytest.approx(numbers(r"loss (\S+)", eager), abs=2e-3)
    assert numbers(r"AUC (\S+)", static) == pytest.approx(numbers(r"AUC (\S+)", eager), abs=0.01)


def test_wide_deep_with_two_servers_learns() -> None:
    clicks = ["--samples", 4096, "--test", 2000, "--batch", 64]
    output = run(*SERVED, EXAMPLES / "wide_deep/train_static.py", *clicks, "--mode", "async")
    assert "async: 2 workers, 2 servers" in output
    assert 0.55 < numbers(r"AUC (\S+)", output)[0] < 0.8
    # each worker pushes after each batch
    assert "servers: 64 pushes, staleness " in output


def test_mnist_mlp_with_two_servers_learns_and_saves_a_model() -> None:
    script = EXAMPLES / "mnist_mlp/train_static_servers.py"
    output = run(*SERVED, script, "--limit", 3000, "--batch", 32, "--out", "out")
    assert numbers(r"test accuracy (\S+),", output)[0] > 0.4
    model = fleet.load_inference_model("out/inference")
    assert model(torch.zeros(5, 1, 28, 28)).shape == (5, 10)
