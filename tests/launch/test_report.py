# SPDX-License-Identifier: Apache-2.0
"""The lines that the launcher prints about a job."""

import pathlib
import signal

import pytest

from fleetlight.launch import report
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, JobProcess, Node
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.machines.other_machines import Conclusion, NextAction
from fleetlight.launch.processes.failure import JobFailure, first_of_all
from fleetlight.launch.processes.logs import LogFolder
from fleetlight.launch.processes.watch import Watch
from fleetlight.launch.status import Stop
from fleetlight.observe.console import Tone

ONE = Node(host="a", workers=(("a", 1), ("a", 2)), servers=(("a", 3),))
TWO = Node(host="b", workers=(("b", 1),))
FAILURE = JobFailure(what="worker 1 of 2 exited with code 3", code=3, after_s=2.0, error="E: x")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)


def started(layout: JobLayout) -> str:
    run = Run(job=JobSpec(script="t.py"), layout=layout, log_dir=str(pathlib.Path.cwd() / "log"),
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
    here = pathlib.Path.cwd()
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
