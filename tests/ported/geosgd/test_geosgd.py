# SPDX-License-Identifier: Apache-2.0
"""GeoSGD, line by line; `README.md` has a table of claims and tests."""

from pathlib import Path

import pytest
from tests.ported.jobs import FLEETRUN, logs, numbers, run

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(240)]
COMMAND = [*FLEETRUN, "--server_num=2", "--worker_num=2", Path(__file__).parent / "train.py"]


@pytest.mark.parametrize("k_steps", [5, 400])
def test_workers_agree_at_the_end(k_steps: int, tmp_path: Path) -> None:
    assert "done: all 2 workers exited with code 0" in run(tmp_path, *COMMAND, k_steps, "sgd")
    weights = []
    for text in logs(tmp_path / "log"):
        costs = numbers(r"cost=([\d.]+)", text)
        assert len(costs) == 3 * 50
        assert sum(costs[-20:]) < 0.9 * sum(costs[:20])
        weights += numbers(r"weights ([\d.]+)", text)
    # the barrier leaves all workers with the servers' values
    assert weights[0] == pytest.approx(weights[1], abs=1e-4)


def test_another_optimizer_works_with_a_warning(tmp_path: Path) -> None:
    output = run(tmp_path, *COMMAND, 5, "adagrad")
    assert "done: all 2 workers exited with code 0" in output
    assert "Adagrad" in output or "adagrad" in output
