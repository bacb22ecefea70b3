# SPDX-License-Identifier: Apache-2.0
"""What the log folder says of a job besides metrics."""

import json
from pathlib import Path

import pytest
from tests.dashboard.simulated import SimulatedJob

from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.view.facts import ProcessState


def test_processes_of_other_machines_have_a_host(tmp_path: Path) -> None:
    SimulatedJob(tmp_path, workers=1, servers=1).launcher()
    endpoints = "job x\nserver 0 127.0.0.1:1\nworker 0 127.0.0.1:2\nworker 1 10.0.0.2:3\n"
    (tmp_path / "endpoints.log").write_text(endpoints)
    found = JobFiles(tmp_path).read()
    assert found.processes["worker 1"].host == "10.0.0.2"
    assert found.processes["worker 1"].state is ProcessState.UNKNOWN
    assert found.processes["worker 0"].state is ProcessState.RUNNING
    assert list(found.free_bytes) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("status", "state", "detail"),
    [
        (0, ProcessState.ENDED, "exit code 0"),
        (3, ProcessState.FAILED, "exit code 3"),
        (-9, ProcessState.FAILED, "killed by SIGKILL"),
        (-77, ProcessState.FAILED, "killed by signal 77"),
    ],
)
def test_how_a_process_ended(tmp_path: Path, status: int, state: ProcessState, detail: str) -> None:
    job = SimulatedJob(tmp_path, workers=1, servers=0)
    job.statuses["worker 0"] = status
    job.launcher()
    found = JobFiles(tmp_path).read().processes["worker 0"]
    assert (found.state, found.detail) == (state, detail)


def test_the_job_describes_itself_later(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    files = JobFiles(tmp_path)
    assert files.read().description == {"picture": False}
    path = tmp_path / "metrics" / "job.json"
    path.write_text(json.dumps({"explain": "a_sync", "mode": "async", "svg": "<svg/>", "x": 1}))
    assert files.read().description == {"explain": "a_sync", "mode": "async", "picture": True}
    assert files.picture == "<svg/>"
    path.write_text("not json, and half writ")
    assert files.read().description == {"picture": False}


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    (tmp_path / "launcher.127.0.0.1.1.json").write_text("{")
    found = JobFiles(tmp_path).read()
    assert (found.processes, found.is_over) == ({}, False)
