# SPDX-License-Identifier: Apache-2.0
"""The lines that the launcher prints about a job."""

import dataclasses
import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetlight import errors
from fleetlight.launch import exit_codes, report
from fleetlight.launch.exit_codes import error_code, exit_code, may_pass
from fleetlight.launch.failure_reason import (
    FailureReason,
    termination_message,
    torchelastic_text,
    write_for_engines,
)
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, JobProcess, Node
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.machines.other_machines import Conclusion, NextAction
from fleetlight.launch.processes.failure import JobFailure, first_of_all
from fleetlight.launch.processes.logs import LogFolder
from fleetlight.launch.processes.watch import Watch
from fleetlight.launch.remedy import remedy
from fleetlight.launch.screen import Prefixed, arguments_block, boxed
from fleetlight.launch.status import (
    UNKNOWN,
    ProcessStatus,
    Stop,
    clear_saves_at_sigterm,
    read,
    write,
)
from fleetlight.observe.console import Tone

ONE = Node(host="a", workers=(("a", 1), ("a", 2)), servers=(("a", 3),))
TWO = Node(host="b", workers=(("b", 1),))
FAILURE = JobFailure(what="worker 1 of 2 exited with code 3", code=3, after_s=2.0, error="E: x")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def started(layout: JobLayout) -> str:
    run = Run(job=JobSpec(script="t.py"), layout=layout, log_dir=str(Path.cwd() / "log"),
              error_dir="/e")  # fmt: skip
    members: list[JobProcess] = layout.members()
    return report.started(run, members)


def test_start_line_names_processes_and_logs() -> None:
    assert started(JobLayout(nodes=(ONE,))) == (
        "starting t.py: server 0 of 1 and workers 0 to 1 of 2 on this machine; "
        "logs: log/serverlog.N, log/workerlog.N"
    )
    assert started(JobLayout(nodes=(ONE, TWO), own=1)) == (
        "starting t.py: worker 2 of 3 on node 1 (b); logs: log/workerlog.N"
    )


def test_first_server_and_first_worker_are_shown() -> None:
    members = JobLayout(nodes=(ONE,)).members()
    assert [member.name for member in report.first_of_each_kind(members)] == [
        "server 0",
        "worker 0",
    ]
    assert [
        member.name for member in report.first_of_each_kind(JobLayout(nodes=(TWO,)).members())
    ] == ["worker 0"]
    assert "Value (server 0)" in report.table(
        report.first_of_each_kind(members)[0], {"FLEET_INDEX": "0"}
    )


def test_end_line() -> None:
    done = Watch([], grace_s=1)
    assert report.end(JobLayout(nodes=(TWO,)), done, None, 1.0) == (
        "done: the worker exited with code 0 after 1.0 s"
    )
    assert report.end(JobLayout(nodes=(ONE, TWO)), done, None, 1.0) == (
        "done: all 3 workers on 2 machines exited with code 0 after 1.0 s; "
        "servers ended by themselves"
    )
    done.ended_servers = True
    assert report.end(JobLayout(nodes=(ONE,)), done, None, 1.0).endswith("; servers ended")
    assert report.end(JobLayout(nodes=(ONE,)), done, FAILURE, 9.0) == (
        "failed: worker 1 of 2 exited with code 3 after 2.0 s: E: x"
    )


def test_interrupt_never_restarts_and_is_no_failure() -> None:
    interrupted = report.interrupted(signal.SIGINT, 1.5, "node 0 (a)")
    assert str(interrupted) == "node 0 (a): stopped by you after 1.5 s"
    assert (interrupted.code, interrupted.may_restart) == (130, False)
    done = Watch([], grace_s=1)
    assert report.end(JobLayout(nodes=(ONE,)), done, interrupted, 9.0) == str(interrupted)
    assert report.tone_of_end(interrupted) is Tone.PLAIN
    assert report.tone_of_end(FAILURE) is Tone.BAD
    assert str(report.interrupted(signal.SIGTERM, 1.5)) == "stopped by SIGTERM after 1.5 s"


def test_reason_of_a_restart() -> None:
    failed = Conclusion(next=NextAction.RESTART, failure=FAILURE)
    assert report.restarting(failed, 2, 1).endswith(
        "E: x; restarting all processes (restart 2, 1 left)"
    )
    lost = Conclusion(
        next=NextAction.REGROUP, failure=JobFailure(what="node 1 (b) was lost", code=1)
    )
    assert report.restarting(lost, 1, 0).startswith("node 1 (b) was lost; restarting with")
    assert "another machine joined" in report.restarting(Conclusion(next=NextAction.REGROUP), 1, 0)


def test_lines_about_the_log_folder() -> None:
    here = Path.cwd()
    assert report.folder(LogFolder(here / "log"), "log", verbose=True) == []
    moved = LogFolder(here / "log", moved_to=here / "log/old/1")
    assert report.folder(moved, "log", verbose=False) == []
    (line,) = report.folder(moved, "log", verbose=True)
    assert line == "moved the logs of an earlier run to log/old/1"
    (line,) = report.folder(LogFolder(here / "log-2"), "log", verbose=False)
    assert line == "log is in use by another fleetrun: logs of this run go to log-2"


def test_stop_is_no_failure_and_names_the_resume_command() -> None:
    done = Watch([], grace_s=1)
    failure = report.stopped(Stop(7, "/c"))
    assert (failure.code, failure.may_restart) == (75, False)
    assert report.end(JobLayout(nodes=(ONE,)), done, failure, 1.0).startswith("stopped at step 7, ")
    # a machine with workers takes precedence, and a real failure over both
    others = [report.stopped(Stop(0, "/c")), failure]
    assert first_of_all(others) is failure
    assert first_of_all([*others, FAILURE]) is FAILURE


def test_failed_stop_names_what_remains() -> None:
    late = report.interrupted(signal.SIGTERM, 30.0, error=report.not_saved(None))
    assert str(late).endswith(
        "by SIGTERM after 30.0 s: the job did not save in time; earlier saves remain"
    )
    assert "the job did not save (worker 1 of 2 exited with code 3" in report.not_saved(FAILURE)
    early = report.interrupted(signal.SIGTERM, 3.0, error=report.stopped_early("/there", "log"))
    assert str(early) == (
        "stopped by SIGTERM after 3.0 s: the job saved nothing; /there is unchanged "
        "(fleetlight stop log saves first)"
    )
    assert report.stopped_early(None, "log") == ""


def test_script_that_never_joins_is_named() -> None:
    servers = report.not_joined(JobLayout(nodes=(ONE,)), "t.py")
    assert servers is not None
    assert servers[1] is Tone.WARNING
    assert servers[0].startswith("t.py never called fleet.init: the servers stored nothing")
    pair = Node(host="a", workers=(("a", 1), ("a", 2)))
    workers = report.not_joined(JobLayout(nodes=(pair,)), "t.py")
    assert workers is not None
    assert workers[1] is Tone.PLAIN
    assert "each of the 2 workers trained alone" in workers[0]
    assert report.not_joined(JobLayout(nodes=(TWO,)), "t.py") is None


# -- the output of the launcher: prefixes, tables and the arguments


def test_only_whole_lines_get_a_prefix() -> None:
    shown: list[bytes] = []
    prefixed = Prefixed("worker 1", shown.append)
    prefixed(b"on")
    assert shown == []
    prefixed(b"e\ntwo\nthr")
    assert b"".join(shown) == b"[worker 1] one\n[worker 1] two\n"
    prefixed(b"ee")
    prefixed.finish()
    prefixed.finish()
    assert b"".join(shown[1:]) == b"[worker 1] three\n"


def test_table_is_a_box() -> None:
    text = boxed(("Distributed Envs", "Value"), [("FLEET_INDEX", "0"), ("FLEET_MASTER", "h:1")])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].replace(" ", "") == "|DistributedEnvs|Value|"
    assert lines[3] == "| FLEET_INDEX      | 0     |"


def test_long_value_keeps_both_ends() -> None:
    text = boxed(("a", "b"), [("x", "begin" + "-" * 200 + "end")], width=60)
    assert all(len(line) == 60 for line in text.splitlines())
    assert "begin" in text
    assert "... " not in text
    assert "end |" in text


def test_arguments_are_listed() -> None:
    text = arguments_block([("script", "t.py")])
    assert text.splitlines()[0] == "-----------  Configuration Arguments -----------"
    assert "script: t.py" in text


# -- what a user is told to do after a failure


WORKER_FAILED = JobFailure(
    what="worker 1 of 2 exited with code 1", code=1, error="E: x", log="log/w.1"
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "correct the script or its data, then start the job again"),
        ({"traceback": "Traceback"}, "or its data where the traceback ends"),
        ({"error": "", "code": 3}, "the script exited with this code itself"),
        ({"code": 78, "may_restart": False}, "a restart fails in the same way"),
        ({"code": 69, "consequence": True}, "no process has failed on its own"),
        ({"code": 137, "killed": True, "error": ""}, "look for out of memory in dmesg"),
        ({"code": 139, "killed": True}, "the log has the stacks of its threads"),
        ({"stopped": True}, ""),
        ({"interrupted": True}, ""),
        # a lost machine has no log
        ({"log": ""}, ""),
    ],
)
def test_sentence_fits_the_failure(changes: dict[str, object], sentence: str) -> None:
    text = remedy(dataclasses.replace(WORKER_FAILED, **changes), "log", None)  # type: ignore[arg-type]
    assert sentence in text
    assert bool(text) == bool(sentence)


def test_job_with_checkpoints_can_resume() -> None:
    assert remedy(WORKER_FAILED, "log", "/ckpt").endswith("continues from the last save in /ckpt")
    permanent = dataclasses.replace(WORKER_FAILED, code=78, may_restart=False)
    assert "/ckpt" not in remedy(permanent, "log", "/ckpt")


# -- the reason of a failure where engines look for it


CAUSE = FailureReason(role="worker", index=1, code=78, error="PlanError: no", permanent=True)
EFFECT = FailureReason(role="worker", index=0, code=69, error="PeerError: no", caused_by_peer=True)
AS_JSON = {
    "role": "worker",
    "index": 1,
    "code": 78,
    "error": "PlanError: no",
    "caused_by_peer": False,
    "permanent": True,
}


def test_error_file_equals_torchelastics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import error_handler

    def without_time(text: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(text)
        assert int(found["message"]["extraInfo"].pop("timestamp")) > 0
        return found

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "torch.json"))
    try:
        raise KeyError("x")
    except KeyError as error:
        error_handler.ErrorHandler().record_exception(error)
        reason = FailureReason(code=1, error=f"KeyError: {error}")
        ours = torchelastic_text(reason, traceback.format_exc(), 5.9)
    assert without_time(ours) == without_time((tmp_path / "torch.json").read_text())


@pytest.mark.parametrize("text", ["x", "\n", "\x01", "é", "…"])
def test_termination_message_fits(text: str) -> None:
    message = termination_message(msgspec.structs.replace(CAUSE, error=text * 5000))
    assert 4000 < len(message) <= 4096
    found = json.loads(message)
    assert found.pop("error").rstrip(".") in text * 5000
    assert {**found, "error": "PlanError: no"} == AS_JSON


def test_reason_goes_where_the_engine_asks(tmp_path: Path) -> None:
    error_file, log, default = (tmp_path / name for name in ("error", "log", "default"))
    absent = str(tmp_path / "absent")
    env = {"TORCHELASTIC_ERROR_FILE": str(error_file), "FLEET_TERMINATION_LOG": str(log)}
    write_for_engines(CAUSE, "stack", env, absent)
    assert json.loads(log.read_text()) == AS_JSON
    assert json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"] == "stack"
    default.touch()
    write_for_engines(CAUSE, env={}, default_log=str(default))
    assert json.loads(default.read_text()) == AS_JSON
    write_for_engines(CAUSE, env={}, default_log=absent)
    assert {path.name for path in tmp_path.iterdir()} == {"error", "log", "default"}


def test_consequence_does_not_replace_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {"FLEET_TERMINATION_LOG": str(log)}
    codes = []
    for reason in (EFFECT, CAUSE, EFFECT):
        write_for_engines(reason, env=env)
        codes.append(json.loads(log.read_text())["code"])
    assert codes == [69, 78, 78]


# -- the contract of exit codes


def test_codes_are_those_of_sysexits() -> None:
    codes = (exit_codes.PEER_FAILED, exit_codes.RESUME_CODE, exit_codes.PERMANENT)
    assert codes == (os.EX_UNAVAILABLE, os.EX_TEMPFAIL, os.EX_CONFIG) == (69, 75, 78)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RoleError("x"), 78),
        (errors.StrategyError("x"), 78),
        (errors.PlanError("x"), 78),
        (errors.JournalError("x"), 78),
        # another start may succeed
        (errors.AddressError("x"), 1),
        (errors.ComebackError("x"), 1),
        (errors.DivergedError("x"), 1),
        (errors.PeerLostError("x"), 69),
        (errors.DeadlineError("x"), 69),
        (errors.StoppedError("x"), 69),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_code_of_an_error(error: BaseException, code: int) -> None:
    assert error_code(error) == code


def test_signals_count_as_in_shells() -> None:
    assert [exit_code(status) for status in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_what_a_restart_may_change() -> None:
    assert all(map(may_pass, (1, 69, -9, -11)))
    assert not any(map(may_pass, (0, 2, 75, 78, 127)))


# -- the status file by which processes report to their launcher


def test_status_round_trips(tmp_path: Path) -> None:
    file = str(tmp_path / "worker.0")
    for status in (
        ProcessStatus(error="ValueError: x", permanent=True, saves_at_sigterm=True),
        ProcessStatus(exiting=True, stopped=Stop(7, "/c")),
    ):
        before = time.monotonic()
        write(file, status)
        found = read(file)
        assert found.at is not None
        assert before <= found.at <= time.monotonic()
        assert ProcessStatus(at=found.at) != found
        assert (found.error, found.permanent, found.stopped) == (
            status.error,
            status.permanent,
            status.stopped,
        )
    assert [one.name for one in tmp_path.iterdir()] == ["worker.0"]


@pytest.mark.parametrize(
    "text", ["", "not json", "[]", '{"error": 3}', '{"stopped": {"step": "x", "folder": "c"}}']
)
def test_unreadable_file_is_an_unknown_status(tmp_path: Path, text: str) -> None:
    (tmp_path / "w").write_text(text)
    assert read(str(tmp_path / "w")) is UNKNOWN
    assert read(str(tmp_path / "none")) is UNKNOWN


def test_new_process_has_not_reported_that_it_saves(tmp_path: Path) -> None:
    file = str(tmp_path / "w")
    clear_saves_at_sigterm(file)
    assert read(file) is UNKNOWN
    write(file, ProcessStatus(restartable=True, saves_at_sigterm=True))
    clear_saves_at_sigterm(file)
    found = read(file)
    assert (found.restartable, found.saves_at_sigterm) == (True, False)
