# SPDX-License-Identifier: Apache-2.0
"""The failure that a job reports: cause, certainty and text."""

import dataclasses
import json
import pathlib
import signal

import pytest

import fleetlight
from fleetlight.launch.exit_codes import RESUME_CODE, exit_code
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.failure import (
    JobFailure,
    ProcessExit,
    failure_of,
    first_failure,
    first_of_all,
    how,
    last_error,
    last_traceback,
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
    found = first_failure([exit_of(0, 1, 1, caused_by_peer=True), exit_of(1, 1, 2)])
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


PACKAGE = pathlib.Path(fleetlight.__file__).parent

TRACEBACK = """step 1
Traceback (most recent call last):
  File "t.py", line 1, in f
    g()
my.module.Broken: no more   data

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "t.py", line 2, in <module>
    f()
ValueError: second
goodbye
"""

STACKS = """\
Thread 0x00007f01 (most recent call first):
  File "threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "train.py", line 9 in <module>

Extension modules: numpy, torch (total: 2)
"""
NO_STACK = """\
Current thread 0x00007f02 (most recent call first):
  <no Python frame>
"""


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (TRACEBACK, "ValueError: second"),
        (TRACEBACK.partition("During")[0], "Broken: no more data"),
        ("fleetlight.errors.ConfigError: a.b: c\n", "ConfigError: a.b: c"),
        ("x\nRuntimeError: a\ny\n", "RuntimeError: a"),
        ("x\nSystemExit: no data in clicks/\ny\n", "SystemExit: no data"),
        ("Fatal Python error: no module encodings\n\nThread 1\n", "Fatal Python error: no mod"),
        (
            "step 2\nFatal Python error: Segmentation fault\n\n" + STACKS,
            "at train.py:9 in <module>",
        ),
        ("bad\nFatal Python error: Aborted\n\n" + STACKS, "last line: bad; at train.py:9 in <mod"),
        ("bad\nFatal Python error: Aborted\n\n" + NO_STACK, "last line: bad"),
        ("terminate called\n  what(): y\nFatal Python error: Aborted\n\n", "terminate called"),
        ("step 1\nstep 2\n\n", ""),
        ("ValueError: old\n--- restart 1 ---\nstep\n", ""),
        ("", ""),
    ],
)
def test_last_error_of_a_log(log: str, found: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    assert last_error(file).startswith(found)
    assert bool(last_error(file)) == bool(found)


def test_long_line_is_truncated(tmp_path: pathlib.Path) -> None:
    (tmp_path / "log").write_text("ValueError: " + "x" * 1000)
    assert len(last_error(tmp_path / "log")) == 500


SECOND = TRACEBACK.partition("During")[2].partition("\n\n")[2].removesuffix("goodbye\n")


def traceback_of(tmp_path: pathlib.Path, log: str, reported: str | None) -> str:
    (tmp_path / "log").write_text(log)
    return last_traceback(tmp_path / "log", reported)


def test_traceback_is_that_of_the_reported_error(tmp_path: pathlib.Path) -> None:
    chain = TRACEBACK.removeprefix("step 1\n").removesuffix("goodbye\n").rstrip()
    assert traceback_of(tmp_path, TRACEBACK.replace("goodbye", "[fleet worker 1] x"), None) == chain
    caught = "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\nstep 2\n"
    assert traceback_of(tmp_path, SECOND + caught, "ValueError: second") == SECOND.rstrip()
    assert traceback_of(tmp_path, caught, "ValueError: second") == ""
    assert traceback_of(tmp_path, caught, "exited with code 3") == ""
    assert traceback_of(tmp_path, "step 1\nstep 2\n", None) == ""
    assert traceback_of(tmp_path, SECOND + "--- restart 1 ---\nstep\n", None) == ""


def test_traceback_has_no_colours_and_no_ranks(tmp_path: pathlib.Path) -> None:
    coloured = SECOND.replace("ValueError", "\x1b[1;35mValueError\x1b[0m")
    ranked = "".join(f"[rank1]: {line}" for line in coloured.splitlines(keepends=True))
    assert traceback_of(tmp_path, ranked, "ValueError: second") == SECOND.rstrip()


def test_error_of_several_lines_is_whole_up_to_foreign_lines(tmp_path: pathlib.Path) -> None:
    text = SECOND.rstrip() + "\nthe second line\n[fleet worker 1] left\n"
    assert traceback_of(tmp_path, text, None) == SECOND.rstrip() + "\nthe second line"


def test_long_traceback_keeps_both_ends(tmp_path: pathlib.Path) -> None:
    frames = "".join(f'  File "t.py", line {n}, in f\n    f()\n' for n in range(60))
    log = f"Traceback (most recent call last):\n{frames}ValueError: deep\n"
    lines = traceback_of(tmp_path, log, "ValueError: deep").splitlines()
    assert len(lines) == 30
    assert lines[1] == '  File "t.py", line 0, in f'
    assert lines[6] == "  ... 93 more lines in the log ..."
    assert lines[-3:] == ['  File "t.py", line 59, in f', "    f()", "ValueError: deep"]


def test_long_chain_is_cut_to_its_last_error(tmp_path: pathlib.Path) -> None:
    frames = "".join(f'  File "t.py", line {n}, in f\n    f()\n' for n in range(20))
    log = TRACEBACK.replace('  File "t.py", line 1, in f\n    g()\n', frames)
    assert traceback_of(tmp_path, log, "ValueError: second") == SECOND.rstrip() + "\ngoodbye"


def test_stack_of_a_crash_is_that_of_the_current_thread(tmp_path: pathlib.Path) -> None:
    log = "step 1\nterminate called\nFatal Python error: Aborted\n\n" + STACKS
    assert traceback_of(tmp_path, log, None).splitlines() == [
        "step 1",
        "terminate called",
        "Fatal Python error: Aborted",
        "Current thread 0x00007f02 (most recent call first):",
        '  File "train.py", line 9 in <module>',
    ]


def frames(*files: str) -> str:
    return "".join(f'  File "{file}", line 1, in f\n    f()\n    ^^^\n' for file in files)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("fleetlight.errors.ConfigError: x", ["  ... 2 frames inside fleetlight ..."]),
        # it may be a bug of Fleetlight
        ("AssertionError: x", frames(f"{PACKAGE}/a.py", f"{PACKAGE}/b/c.py").splitlines()),
    ],
)
def test_frames_of_fleetlight_are_left_out_of_its_own_errors(
    error: str, shown: list[str], tmp_path: pathlib.Path
) -> None:
    files = ("train.py", f"{PACKAGE}/a.py", f"{PACKAGE}/b/c.py", "lambda.py")
    log = f"Traceback (most recent call last):\n{frames(*files)}{error}\n"
    assert traceback_of(tmp_path, log, None).splitlines() == [
        "Traceback (most recent call last):",
        *frames("train.py").splitlines(),
        *shown,
        *frames("lambda.py").splitlines(),
        error,
    ]
