# SPDX-License-Identifier: Apache-2.0
"""Jobs: results are found in output and logs, and a failed or silent job ends."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks import jobs

PRINT = 'print(\'RESULT {"steps": 10, "seconds": 2.0, "cpu_seconds": 1.0}\')'
IN_LOG = f"import os, sys; os.mkdir('log'); sys.stdout = open('log/workerlog.1', 'w'); {PRINT}"
# stays until it is ended, and writes its process id for the test
STAY = "import os, sys, threading; open(sys.argv[1], 'w').write(str(os.getpid())); "
STAY += "threading.Event().wait(60)"


def python(code: str, *arguments: str) -> jobs.Command:
    """A command that runs `code`."""
    return jobs.Command([sys.executable, "-c", code, *arguments])


def test_results_are_read_from_output_and_log_files() -> None:
    run = jobs.run(jobs.Job("two", [python(PRINT), python(IN_LOG.replace("2.0", "5.0"))]))
    assert len(run.results) == 2
    assert run.rate == 2.0
    assert run.cpu_ms == 100.0
    assert run.wall_s > 0


def test_a_line_shown_twice_counts_once() -> None:
    with pytest.raises(jobs.BenchmarkError, match="got 1 RESULT lines, expected 2"):
        jobs.run(jobs.Job("twice", [python(f"{PRINT}; {PRINT}")]))


def test_a_failure_is_reported_and_ends_the_others(tmp_path: os.PathLike[str]) -> None:
    pid_file = os.path.join(tmp_path, "pid")
    fail_after_it = (
        f"import os\nwhile not os.path.getsize({pid_file!r}): pass\nraise SystemExit('no')"
    )
    open(pid_file, "w").close()
    with pytest.raises(jobs.BenchmarkError, match=r"(?s)exit code 1.*process1\.log\nno"):
        jobs.run(jobs.Job("bad", [python(STAY, pid_file), python(fail_after_it)], deadline_s=60))
    with open(pid_file) as file, pytest.raises(ProcessLookupError):
        os.kill(int(file.read()), 0)


def test_a_job_that_does_not_end_stops_at_its_deadline(tmp_path: os.PathLike[str]) -> None:
    stay = python(STAY, os.path.join(tmp_path, "pid"))
    with pytest.raises(jobs.BenchmarkError, match=r"late: not finished after 0\.2 s"):
        jobs.run(jobs.Job("late", [stay], deadline_s=0.2))


def test_every_process_has_one_thread_and_finds_the_package() -> None:
    environment = jobs.environment({"RANK": "1"})
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert str(jobs.ROOT) in environment["PYTHONPATH"].split(os.pathsep)
    assert environment["RANK"] == "1"


def test_workers_have_different_ranks() -> None:
    first, second = jobs.workers(["program"])
    assert (first.environment["RANK"], second.environment["RANK"]) == ("0", "1")
    assert first.environment["MASTER_PORT"] == second.environment["MASTER_PORT"]
