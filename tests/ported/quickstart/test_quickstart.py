# SPDX-License-Identifier: Apache-2.0
"""Fleet's static quick start, line by line; `README.md` has a table of claims and tests."""

import sys
from pathlib import Path

import pytest
from tests.ported.jobs import FLEETRUN, logs, numbers, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
COLLECTIVE, SERVERS = HERE / "collective_trainer.py", HERE / "parameter_server_trainer.py"


def assert_learns(text: str, at_least: float) -> None:
    """The loss falls, and most predictions of the last batches are right."""
    losses, shares = numbers(r"loss: ([\d.]+)", text), numbers(r"acc: ([\d.]+)", text)
    assert losses[-1] < losses[0]
    assert sum(shares[-5:]) / 5 > at_least, shares


@pytest.mark.long
def test_synchronous_training_learns(tmp_path: Path) -> None:
    output = run(tmp_path, *FLEETRUN, "--nproc_per_node", "2", COLLECTIVE)
    assert "done: all 2 workers exited with code 0" in output
    assert "all_reduce: 6 -> 1" in output
    workers = logs(tmp_path / "log")
    for text in workers:
        assert_learns(text, 0.85)
    first, second = (numbers(r"weights ([\d.]+)", text) for text in workers)
    assert first == second
    # 1541 records in blocks of 2 x 64
    assert numbers(r"step (\d+) loss", workers[0])[-1] == 10 * (1541 // 128)


def test_missing_gpus_are_an_error(tmp_path: Path) -> None:
    command = [*FLEETRUN, "--gpus", "0,1,2,3", COLLECTIVE]
    output = run(tmp_path, *command, code=2, CUDA_VISIBLE_DEVICES="")
    assert "this machine has no GPU; use --nproc_per_node 4" in output


@pytest.mark.long
def test_parameter_servers_learn(tmp_path: Path) -> None:
    output = run(tmp_path, *FLEETRUN, "--worker_num", "2", "--server_num", "2", SERVERS)
    assert "done: all 2 workers exited with code 0" in output
    assert len(logs(tmp_path / "log", "serverlog")) == 2
    for text in logs(tmp_path / "log"):
        losses = numbers(r"loss: ([\d.]+)", text)
        assert len(losses) == 3 * (1541 // 128)
        assert losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.parametrize("script", [COLLECTIVE, SERVERS], ids=lambda path: str(path.stem))
def test_one_process_learns(script: Path, tmp_path: Path) -> None:
    assert_learns(run(tmp_path, sys.executable, script), 0.8)
