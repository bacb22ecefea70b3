# SPDX-License-Identifier: Apache-2.0
"""One child process."""

import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest
from tests.launch.workplace import is_running, wait_until

from fleetlight.errors import LaunchError
from fleetlight.launch.processes.child import Child, Reaper


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with Reaper() as handle:
        yield handle


@pytest.fixture
def output(tmp_path: pathlib.Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def child(code: str, output: int, reaper: Reaper) -> Child:
    return Child([sys.executable, "-c", code], os.environ, output, reaper)


def waited_exit(one: Child) -> int:
    wait_until(lambda: one.poll() is not None, "the child to end")
    status = one.poll()
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_exit_status_of_a_child(code: str, status: int, output: int, reaper: Reaper) -> None:
    one = child(code, output, reaper)
    assert waited_exit(one) == status
    one.end()
    assert one.poll() == status


def test_child_leads_a_process_group_and_has_no_input(
    output: int, reaper: Reaper, tmp_path: pathlib.Path
) -> None:
    one = child("import os, sys; print(os.getpgid(0), repr(sys.stdin.read()))", output, reaper)
    assert waited_exit(one) == 0
    one.end()
    assert (tmp_path / "out").read_text() == f"{one.pid} ''\n"


def test_exited_child_keeps_its_pid_until_it_is_reaped(output: int, reaper: Reaper) -> None:
    one = child("pass", output, reaper)
    waited_exit(one)
    os.kill(one.pid, 0)  # still a zombie
    one.end()
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)


GRANDCHILD = """
import pathlib, subprocess
process = subprocess.Popen(["sleep", "60"])
pathlib.Path("{file}").write_text(f"{{process.pid}}\\n")
"""


def test_end_kills_grandchildren(output: int, reaper: Reaper, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pid"
    one = child(GRANDCHILD.format(file=file), output, reaper)
    waited_exit(one)
    grandchild = int(file.read_text())
    assert is_running(grandchild)
    one.end()
    wait_until(lambda: not is_running(grandchild), "the grandchild to end")


def test_signal_reaches_the_child(output: int, reaper: Reaper) -> None:
    one = child("import time; time.sleep(60)", output, reaper)
    one.signal(signal.SIGTERM)
    assert waited_exit(one) == -signal.SIGTERM
    one.end()


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed in /proc")
def test_child_inherits_no_descriptor_of_the_launcher(
    output: int, reaper: Reaper, tmp_path: pathlib.Path
) -> None:
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    one = child(code, output, reaper)
    assert waited_exit(one) == 0
    one.end()
    assert (tmp_path / "out").read_text() == "[0, 1, 2]\n"


def test_failed_start_raises_launch_error(output: int, reaper: Reaper) -> None:
    with pytest.raises(LaunchError, match="cannot start"):
        Child([sys.executable, "x" * 10_000_000], os.environ, output, reaper)


def test_ask_signals_the_leader_only(output: int, reaper: Reaper, tmp_path: pathlib.Path) -> None:
    code = (
        "import signal, subprocess, sys; "
        "signal.signal(signal.SIGTERM, lambda *_: None); "
        "inner = subprocess.Popen(['sleep', '600']); "
        "print(inner.pid, flush=True); signal.pause(); print('asked', flush=True); signal.pause()"
    )
    one = child(code, output, reaper)
    text = tmp_path / "out"
    wait_until(lambda: text.read_text().endswith("\n"), "the child to begin")
    one.ask(signal.SIGTERM)
    wait_until(lambda: text.read_text().endswith("asked\n"), "it to be asked")
    inner = int(text.read_text().split()[0])
    assert is_running(inner)
    one.end()
    wait_until(lambda: not is_running(inner), "the other to end")
