# SPDX-License-Identifier: Apache-2.0
"""The failure that a job reports: cause, certainty and text."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal

import pytest

from fleetlight.launch.exit_codes import RESUME_CODE, exit_code
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.failure import (
    JobFailure,
    ProcessExit,
    failure_of,
    first_failure,
    first_of_all,
    how,
)
from fleetlight.launch.status import ProcessStatus, Stop
from fleetlight.roles.role import Kind


def exit_of(index: int, status: int, at: float, **more: object) -> ProcessExit:
    member = JobProcess(kind=Kind.WORKER, index=index, of=4, local_rank=index, local_size=4)
    return ProcessExit(member=member, status=status, at=at, reported=ProcessStatus(**more))  # type: ignore[arg-type]


def test_earliest_failure_is_reported() -> None:
    exits = [exit_of(0, 0, 1), exit_of(1, 1, 3), exit_of(2, 5, 2)]
    found = first_failure(exits)
    assert found is not None
    assert found.member.index == 2
    assert first_failure(exits[:1]) is None


def test_cause_is_preferred_to_its_consequence() -> None:
    exits = [exit_of(0, 1, 1, caused_by_peer=True), exit_of(1, 1, 2)]
    found = first_failure(exits)
    assert found is not None
    assert found.member.index == 1


def test_process_killed_from_outside_is_the_cause() -> None:
    exits = [exit_of(0, 1, 1), exit_of(1, -signal.SIGKILL, 2), exit_of(2, -signal.SIGABRT, 0)]
    found = first_failure(exits)
    assert found is not None
    assert found.member.index == 1


def test_stop_needs_the_exit_code_and_a_status() -> None:
    member = exit_of(0, 0, 0).member
    reported = ProcessStatus(exiting=True, stopped=Stop(7, "/c"))
    # a process killed after it reported its stop has saved
    for status in (RESUME_CODE, -signal.SIGKILL):
        assert ProcessExit.of(member, status, reported, 1.0).stop == Stop(7, "/c")
    # a script may use code 75 for itself
    assert ProcessExit.of(member, RESUME_CODE, ProcessStatus(exiting=True), 1.0).stop is None
    for status in (1, -signal.SIGABRT):
        assert ProcessExit.of(member, status, reported, 1.0).stop is None


def test_exit_has_the_time_of_its_error() -> None:
    member = exit_of(0, 0, 0).member
    assert ProcessExit.of(member, 1, ProcessStatus(at=2.5, error="E: x"), seen_at=3.0).at == 2.5
    assert ProcessExit.of(member, 1, ProcessStatus(at=2.5), seen_at=3.0).at == 3.0


def test_certain_causes() -> None:
    assert exit_of(0, -signal.SIGKILL, 0).is_root_cause
    assert exit_of(0, 1, 0, error="ValueError: x").is_root_cause
    assert not exit_of(0, 1, 0, error="PeerError: x", caused_by_peer=True).is_root_cause
    assert not exit_of(0, 1, 0).is_root_cause
    assert not exit_of(0, -signal.SIGABRT, 0).is_root_cause


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (3, 3, "exited with code 3"),
        (-9, 137, "was killed by SIGKILL (often: out of memory)"),
        (-11, 139, "was killed by SIGSEGV (a crash in native code)"),
        (-15, 143, "was killed by SIGTERM"),
        (-40, 168, "was killed by signal 40"),
    ],
)
def test_status_as_text(status: int, code: int, text: str) -> None:
    assert exit_code(status) == code
    assert how(status) == text


@pytest.mark.parametrize(
    ("status", "log", "error"),
    [
        (3, "step\nno data\n", "last line: no data"),
        (3, "", ""),
        (3, "no data\n[fleet worker 0] saved ckpt at step 3\n", ""),
        (-signal.SIGKILL, "step\nno data\n", ""),
        (-signal.SIGABRT, "step\nfree(): invalid pointer\n", "last line: free(): invalid pointer"),
        (-signal.SIGABRT, "terminate called after x\n  what(): y\n", "terminate called after x"),
    ],
)
def test_last_line_of_the_log_is_not_the_cause_of_a_signal(
    status: int, log: str, error: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "log").write_text(log)
    assert failure_of(exit_of(1, status, 0), tmp_path / "log", after_s=1.0).error == error


def test_exit_code_is_reported_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "log").write_text("step\n")
    one = exit_of(1, 3, 0, error="exited with code 3")
    assert str(failure_of(one, tmp_path / "log", after_s=1.0)).count("exited with code 3") == 1


def test_permanent_error_causes_no_restart(tmp_path: pathlib.Path) -> None:
    for permanent in (False, True):
        one = exit_of(1, 3, 0, error="E: x", permanent=permanent)
        assert failure_of(one, tmp_path / "log", after_s=1.0).may_restart is not permanent


def test_code_of_a_permanent_error_causes_no_restart(tmp_path: pathlib.Path) -> None:
    """A script may end with sys.exit(78) itself."""
    found = [failure_of(exit_of(1, code, 0), tmp_path / "log", after_s=1.0) for code in (78, 1)]
    assert [one.may_restart for one in found] == [False, True]


def test_failure_as_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workerlog.1").write_text("ValueError: from the log\n")
    log = tmp_path / "workerlog.1"
    reported = failure_of(exit_of(1, 3, 0), log, after_s=2.04, node="node 1 (h)")
    assert str(reported) == (
        "node 1 (h): worker 1 of 4 exited with code 3 after 2.0 s: ValueError: from the log "
        "(log: workerlog.1)"
    )
    reported = failure_of(exit_of(1, 3, 0, error="E: its own\nwords"), log, after_s=2.04)
    assert "E: its own words" in str(reported)
    assert JobFailure(**json.loads(json.dumps(dataclasses.asdict(reported)))) == reported


def test_failure_of_several_machines_is_the_cause() -> None:
    effect = JobFailure(what="a", code=1, consequence=True)
    cause = JobFailure(what="b", code=1)
    killed = JobFailure(what="c", code=137, killed=True)
    assert first_of_all([effect, cause]) is cause
    assert first_of_all([effect, cause, killed]) is killed
    assert first_of_all([]) is None
