# SPDX-License-Identifier: Apache-2.0
"""Every example: the plain twin, ours as one process, ours as a job of two workers."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.examples.running import EXAMPLES, FLEETRUN, ended, numbers, run, start, twins
from tests.workers import reserved_port

import fleetlight as fleet

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

MNIST = ["--limit", "64", "--epochs", "2", "--show_every", "1"]
RANDOM = ["--rows", "256", "--batch", "32", "--size", "64"]
RESNET = ["--limit", "8", "--batch", "8", "--size", "32", "--epochs", "2", "--no-augment"]
CIFAR = ["--batch", "8", "--size", "32", "--epochs", "2", "--no-augment"]


def test_mnist_mlp_alone_equals_its_plain_twin() -> None:
    # each epoch is one batch, so that the order of records does not matter
    plain, ours = twins("mnist_mlp", *MNIST, "--out", "out")
    losses = numbers(r"loss (\S+)", plain)
    assert numbers(r"loss (\S+)", ours) == pytest.approx(losses, abs=1e-4)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert numbers(r"test accuracy (\S+),", ours) == numbers(r"test accuracy (\S+),", plain)


def test_mnist_mlp_with_two_workers_learns_and_saves_a_model() -> None:
    script = EXAMPLES / "mnist_mlp/train_fleet.py"
    output = run(*FLEETRUN, script, "--limit", 3000, "--batch", 32, "--out", "out")
    assert "(generated stand-in)" in output
    assert "all_reduce: 6 -> 1 (25 MiB)" in output
    # far above chance, a tenth: the generated images are noisy
    assert numbers(r"test accuracy (\S+),", output)[0] > 0.4
    assert numbers(r"speed (\d+) examples/s", output)[0] > 0
    assert Path("out/checkpoint/manifest.json").is_file()
    model = fleet.load_inference_model("out/inference")
    assert model(torch.zeros(5, 1, 28, 28)).shape == (5, 10)


def test_random_mlp_alone_equals_its_plain_twin() -> None:
    plain, ours = twins("random_mlp", *RANDOM)
    costs = numbers(r"cost (\S+)", plain)
    assert numbers(r"cost (\S+)", ours) == pytest.approx(costs, abs=2e-6)
    assert len(costs) == 4


def test_random_mlp_with_two_workers_explains_its_settings() -> None:
    output = run(*FLEETRUN, EXAMPLES / "random_mlp/train_fleet.py", *RANDOM)
    assert "! nccl_comm_num = 2: the workers of one host sum in shared memory" in output
    assert "* fuse_all_reduce_ops = True" in output
    assert "! fetch_frequency = 2" in output
    assert "! execution_strategy.num_threads = 3: it is for static programs" in output
    # half the steps of one process, every second one printed
    assert len(numbers(r"cost (\S+)", output)) == 2


def test_resnet50_alone_equals_its_plain_twin() -> None:
    plain, ours = twins("resnet50", *RESNET)
    losses = numbers(r"loss: (\S+),", plain)
    assert numbers(r"loss: (\S+),", ours) == pytest.approx(losses, rel=1e-3)
    assert len(losses) == 2


def test_resnet50_with_two_workers_reports_every_five_batches() -> None:
    script = EXAMPLES / "resnet50/train_fleet.py"
    output = run(
        *FLEETRUN, script, *["--limit", "24", "--batch", "2", "--size", "32", "--epochs", "1"]
    )
    assert "all_reduce: 161 -> 5 (25 MiB)" in output
    report = r"^\[Epoch 0, batch (\d)\] loss: \d+\.\d{5}, acc1: [01]\.\d{5}, acc5: [01]\.\d{5}$"
    assert re.findall(report, output, re.MULTILINE) == ["0", "5"]


def test_cifar10_alone_equals_its_plain_twin() -> None:
    plain, ours = twins("cifar10_cpu", *CIFAR, "--data", cifar10_records(8))
    losses = numbers(r"loss is (\S+)", plain)
    assert numbers(r"loss is (\S+)", ours) == pytest.approx(losses, rel=1e-3)
    assert len(losses) == 2


def test_run_sh_trains_with_a_scheduler_and_two_workers() -> None:
    data = cifar10_records(8)
    arguments = [data, 2, "--batch", 2, "--size", 32, "--epochs", 1]
    holder, port = reserved_port()
    with holder:
        output = run("bash", EXAMPLES / "cifar10_cpu/run.sh", *arguments, MS_SCHED_PORT=port)
    assert "all 2 workers finished" in output
    for worker in range(2):
        log = Path(f"log/worker_{worker}.txt").read_text()
        assert f"worker {worker} of 2" in log
        assert "epoch: 1 step: 2, loss is " in log
        assert "epoch: 1 step: 3" not in log
    assert "all 2 workers have left" in Path("log/scheduler.txt").read_text()


def test_run_sh_ends_all_processes_when_one_fails() -> None:
    python = script(
        """
        [ "${MS_NODE_ID:-}" = 1 ] || exec sleep 60
        echo the reason
        exit 3
        """
    )
    run_sh = start("bash", EXAMPLES / "cifar10_cpu/run.sh", "", 3, PYTHON=python)
    output = ended(run_sh, code=3)
    assert "the reason" in output
    pids = [int(pid) for pid in re.findall(r"started, pid (\d+)", output)]
    assert len(pids) == 4
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_run_sh_without_arguments_prints_its_usage() -> None:
    assert "usage: bash run.sh" in ended(start("bash", EXAMPLES / "cifar10_cpu/run.sh"), code=2)


def cifar10_records(count: int) -> Path:
    """A folder with one file in the binary format of CIFAR-10."""
    records = np.random.default_rng(0).integers(256, size=(count, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    folder = Path("cifar-10-batches-bin").absolute()
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(records.tobytes())
    return folder


def script(body: str) -> Path:
    """A program that run.sh starts in place of Python."""
    path = Path("program").absolute()
    path.write_text(f"#!/usr/bin/env bash\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
