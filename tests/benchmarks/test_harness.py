# SPDX-License-Identifier: Apache-2.0
"""Rounds: each job runs once per round, and the first job rotates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import harness, jobs, report


def test_every_round_runs_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def run(job: jobs.Job) -> jobs.Run:
        order.append(job.name)
        return jobs.Run(1.0, 1.0, 0.0, [{"steps": 10, "seconds": 2.0}])

    monkeypatch.setattr(harness, "run", run)
    make: dict[str, Callable[[], jobs.Job]] = {
        "a": lambda: jobs.Job("a", []),
        "b": lambda: jobs.Job("b", []),
    }
    runs = harness.rounds(make, 3)
    assert "".join(order) == "abbaab"
    assert harness.series(runs)["b"].rates == [5.0, 5.0, 5.0]


def test_any_commands_can_be_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(steps: int) -> str:
        return (
            f"""{sys.executable} -c 'print("RESULT {{\\"steps\\": {steps}, \\"seconds\\": 1}}")'"""
        )

    written: list[str] = []

    def write(name: str, claim: str, sections: list[str]) -> Path:
        written.extend([name, *sections])
        return jobs.ROOT / "page.md"

    monkeypatch.setattr(report, "write", write)
    given = ["--job", f"one={program(10)}", "--job", f"two={program(30)}"]
    assert harness.main(["--name", "pair", "--rounds", "2", *given]) == 0
    assert written[0] == "pair"
    assert "| two / one | 3.00 (3.00..3.00) | - | 3.000 3.000 |" in written[1]
    assert "written: page.md" in capsys.readouterr().out


def test_a_failed_job_is_created_again_up_to_the_attempts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    created: list[int] = []

    def make() -> jobs.Job:
        created.append(len(created))
        return jobs.Job(f"job {created[-1]}", [])

    def run(job: jobs.Job) -> jobs.Run:
        if job.name == "job 0":
            raise jobs.BenchmarkError("it did not start")
        return jobs.Run(1.0, 1.0, 0.0, [{"steps": 10, "seconds": 2.0}])

    monkeypatch.setattr(harness, "run", run)
    with pytest.raises(jobs.BenchmarkError):
        harness.rounds({"a": make}, 1)
    created.clear()
    assert len(harness.rounds({"a": make}, 1, attempts=2)["a"]) == 1
    assert created == [0, 1]
    assert "attempt 1 failed: it did not start" in capsys.readouterr().out
