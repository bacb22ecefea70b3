# SPDX-License-Identifier: Apache-2.0
"""MindSpore's page on CPUs, line by line; `README.md` has a table of claims and tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.ported.jobs import numbers, run
from tests.workers import reserved_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]
HERE = Path(__file__).parent


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Images in the place of CIFAR-10's."""
    draws = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (512,), generator=draws)
    colours = torch.rand(10, 3, 1, 1, generator=draws)
    images = colours[labels] + 0.05 * torch.randn(512, 3, 16, 16, generator=draws)
    torch.save({"images": images, "labels": labels}, tmp_path / "data.pt")
    return tmp_path


def shell_loop(data: Path, workers: int, started: int, **variables: object) -> list[str]:
    """Logs of the workers and, last, of the scheduler."""
    holder, port = reserved_port()
    numbers_ = {"WORKERS": workers, "STARTED": started, "PORT": port, "PYTHON": sys.executable}
    with holder:
        run(data, "bash", HERE / "run.sh", data, **numbers_, **variables)
    names = [*(f"worker_{n}" for n in range(started)), "scheduler"]
    return [(data / f"{name}.txt").read_text() for name in names]


def test_the_shell_loop(data: Path) -> None:
    *workers, scheduler = shell_loop(data, 4, 4)
    ranks = sorted(int(numbers(r"rank (\d)", text)[0]) for text in workers)
    assert ranks == [0, 1, 2, 3]
    for text in workers:
        losses = numbers(r"epoch: \d+ step: \d+, loss is ([\d.]+)", text)
        # 512 records in blocks of 4 x 32, twice
        assert len(losses) == 8
        assert losses[-1] < losses[0]
        assert "512 records in all" in text
    assert len({numbers(r"weights ([\d.]+)", text)[0] for text in workers}) == 1
    assert "loss is" not in scheduler


def test_too_few_workers(data: Path) -> None:
    *workers, scheduler = shell_loop(data, 3, 2, FLEET_DEADLINE_S=3)
    for text in (*workers, scheduler):
        assert "loss is" not in text
    for text in workers:
        assert "the scheduler says: 2 of 3 workers came within 3 s, 1 missing" in text
    assert "2 of 3 workers came within 3 s, 1 missing" in scheduler
