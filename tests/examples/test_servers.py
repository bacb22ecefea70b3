# SPDX-License-Identifier: Apache-2.0
"""Every example with parameter servers: the plain twin, ours alone, ours with 2 servers."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from tests.examples.running import EXAMPLES, ended, numbers, run, start, twins
from tests.launch.workplace import outcome

import fleetlight as fleet

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

SERVED = [sys.executable, "-m", "fleetlight.launch", "--server_num", "2", "--worker_num", "2"]
CLICKS = ["--samples", "4096", "--test", "2000", "--batch", "64"]
#: each epoch is one batch, so that the order of records does not matter
ONE_BATCH = ["--samples", "512", "--test", "2000", "--epochs", "4", "--lr", "0.05"]
AUC = r"AUC (\S+)"


def test_wide_deep_learns_in_every_mode_like_its_plain_twin() -> None:
    script = EXAMPLES / "wide_deep/train_fleet.py"
    running = [start(sys.executable, EXAMPLES / "wide_deep/train_torch.py", *CLICKS)]
    running += [
        start(sys.executable, script, *CLICKS, "--mode", mode) for mode in ("sync", "ssp", "geo")
    ]
    for process in running:
        output = ended(process)
        assert "(best possible on generated data: 0." in output
        assert 0.6 < numbers(AUC, output)[0] < 0.8


def test_wide_deep_runs_with_the_settings_of_a_quick_start() -> None:
    """The rate is too small to learn much, but every step runs."""
    settings = ["--optimizer", "sgd", "--lr", "0.0001", "--batch", "10", "--samples", "400"]
    script = EXAMPLES / "wide_deep/train_fleet.py"
    output = run(*SERVED, script, *settings, "--test", "2000", "--mode", "sync")
    assert "steps 20" in output
    assert 0.4 < numbers(AUC, output)[0] < 0.65


def test_wide_deep_with_two_servers_prints_what_the_demo_promises() -> None:
    output = run(*SERVED, EXAMPLES / "wide_deep/train_fleet.py", *CLICKS)
    assert "async: 2 workers, 2 servers" in output
    assert 0.6 < numbers(AUC, output)[0] < 0.8
    assert numbers(r"speed (\d+) examples/s", output)[0] > 0
    # each worker pushes after each batch
    assert "servers: 64 pushes, staleness " in output
    rows = re.findall(r"(?:wide|deep) ([\d,]+) rows, \d+\.\d MiB", output)
    assert len(rows) == 2
    assert rows[0] == rows[1]
    assert outcome(output).startswith("fleetrun: done: ")
    lines = output.splitlines()
    assert next(n for n, line in enumerate(lines) if line.startswith("epoch 0")) <= 5


def test_mnist_mlp_with_two_servers_learns_and_saves_a_model() -> None:
    script = EXAMPLES / "mnist_mlp/train_servers.py"
    output = run(*SERVED, script, "--limit", 3000, "--batch", 32, "--out", "out")
    assert numbers(r"test accuracy (\S+),", output)[0] > 0.4
    assert "tables: none" in output
    model = fleet.load_inference_model("out/inference")
    assert model(torch.zeros(5, 1, 28, 28)).shape == (5, 10)


def test_word2vec_alone_learns_like_its_plain_twin() -> None:
    for output in twins("word2vec", "--steps", 400, "--show_every", 50, "--dim", 16):
        losses = numbers(r"step \d+ loss (\S+)", output)
        # six words, each with an even chance
        assert losses[0] == pytest.approx(6 * 0.6931, abs=0.01)
        assert losses[-1] < 3.4


@pytest.mark.parametrize(("k_steps", "counted"), [(20, "exchanges 40"), (0, "pushes 800")])
def test_word2vec_with_two_servers_groups_words_by_topic(k_steps: int, counted: str) -> None:
    """With GeoSGD, and with async."""
    script = EXAMPLES / "word2vec/train_fleet.py"
    output = run(*SERVED, script, "--k_steps", k_steps, "--steps", 800, "--dim", 16)
    assert counted in output
    for topic, nearest in re.findall(r"^topic(\d+)_\d+: (.*)$", output, re.MULTILINE):
        of_topic = [word for word in nearest.split(", ") if word.startswith(f"topic{topic}_")]
        assert len(of_topic) >= 4, output


def test_deepfm_alone_and_with_dense_allreduce_equals_its_twin() -> None:
    script = EXAMPLES / "deepfm/train_fleet.py"
    plain, alone = twins("deepfm", *ONE_BATCH, "--batch", 512)
    losses = numbers(r"loss (\S+)", plain)
    assert numbers(r"loss (\S+)", alone) == pytest.approx(losses, abs=2e-4)
    assert losses[-1] < losses[0]
    job = run(*SERVED, script, *ONE_BATCH, "--batch", 256, "--dense", "allreduce")
    assert "all_reduce: 8 -> 1" in job
    assert numbers(AUC, job) == pytest.approx(numbers(AUC, plain), abs=1e-3)
    assert numbers(AUC, alone) == pytest.approx(numbers(AUC, plain), abs=1e-3)
