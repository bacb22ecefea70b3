# SPDX-License-Identifier: Apache-2.0
"""One script under every launcher: equal parameters for an equal global batch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.workers import reserved_port

from fleetlight.security.certificates import make

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("train.py"))
BIN = Path(sys.executable).parent
ROLES = ("FLEET_", "PADDLE_", "MS_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")


def clean() -> dict[str, str]:
    """The variables of this process, without those of a role."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ROLES)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def start(
    command: list[str], env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=clean() | (env or {}),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Exit codes and output."""
    texts = [process.communicate(timeout=120)[0] for process in processes]
    return [process.returncode for process in processes], "\n".join(texts)


def results(text: str) -> list[float]:
    """The printed sums, after checking that each worker printed one."""
    found = re.findall(r"RESULT (\d+) (\d+) ([-\d.]+)", text)
    assert found, text
    assert sorted(int(i) for i, _, _ in found) == list(range(int(found[0][1]))), text
    return [float(total) for _, _, total in found]


@pytest.fixture(scope="module")
def expected() -> float:
    codes, text = finish([start([sys.executable, SCRIPT])])
    assert codes == [0], text
    [total] = results(text)
    return total


def check(codes: list[int], text: str, workers: int, expected: float) -> None:
    assert set(codes) == {0}, text
    # torch's store prints a C++ stack for each request after its server has closed
    assert "frame #" not in text, text
    totals = results(text)
    assert len(totals) == workers
    assert all(abs(total - expected) < 1e-8 for total in totals), (totals, expected)


@pytest.mark.contract
def test_fleetrun(expected: float, tmp_path: Path) -> None:
    command = [str(BIN / "fleetrun"), "--tee", "--nproc_per_node", "2", SCRIPT]
    # fleetrun would hide what torch's store prints
    verbose = {"TORCH_CPP_LOG_LEVEL": "WARNING"}
    check(*finish([start(command, verbose, cwd=tmp_path)]), 2, expected)


def test_torchrun(expected: float) -> None:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", SCRIPT]
    check(*finish([start(command)]), 2, expected)


def test_torchrun_with_certificates(expected: float, tmp_path: Path) -> None:
    """Its store has no TLS, and all traffic stays on this host."""
    make(tmp_path)
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", SCRIPT]
    check(*finish([start(command, {"FLEET_SSL": str(tmp_path)})]), 2, expected)


def test_torchrun_inside_a_slurm_allocation(expected: float) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2"}
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", SCRIPT]
    check(*finish([start(command, slurm)]), 2, expected)


def test_variables_of_the_paddle_operator(expected: float) -> None:
    holder, port = reserved_port()
    endpoints = [f"127.0.0.1:{port}", "127.0.0.1:9"]
    common = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints)}
    processes = [
        start(
            [sys.executable, SCRIPT],
            {**common, "PADDLE_TRAINER_ID": str(i), "PADDLE_CURRENT_ENDPOINT": endpoints[i]},
        )
        for i in range(2)
    ]
    with holder:
        check(*finish(processes), 2, expected)


def test_scheduler_and_workers_of_a_shell_loop(expected: float) -> None:
    holder, port = reserved_port()
    common = {"MS_WORKER_NUM": "4", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
    roles = ["MS_SCHED"] + ["MS_WORKER"] * 4
    processes = [start([sys.executable, SCRIPT], {**common, "MS_ROLE": role}) for role in roles]
    with holder:
        check(*finish(processes), 4, expected)


def test_tasks_of_a_slurm_step(expected: float) -> None:
    common = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    processes = [
        start([sys.executable, SCRIPT], {**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)})
        for i in range(2)
    ]
    check(*finish(processes), 2, expected)
