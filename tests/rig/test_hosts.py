# SPDX-License-Identifier: Apache-2.0
"""Simulated hosts: reachability, byte counts, link shaping and cleanup."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rig.__main__ import main
from rig.hosts import Host, Rig, hosts
from rig.spaces import RigError
from tests.launch.workplace import is_running, wait_until
from tests.rig.needed import NEEDED

from rig import spaces

pytestmark = NEEDED

ROOT = Path(__file__).resolve().parents[2]

SERVE = """
import socket
with socket.create_server(("", 99)) as listener:
    print("ready", flush=True)
    while True:
        with listener.accept()[0] as caller:
            while caller.recv(1 << 20):
                pass
            caller.sendall(b"!")
"""
CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], 99), timeout=float(sys.argv[3])) as server:
    server.sendall(bytes(int(sys.argv[2])))
    server.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b"!"
"""
HOLD = """
import sys
from rig.hosts import hosts
with hosts(1) as rig:
    running = rig.hosts[0].start([sys.executable, "-c", "import time; time.sleep(600)"])
    print(rig.hosts[0].name, running.pid, flush=True)
    sys.stdin.read()
"""


def serve(host: Host) -> None:
    running = host.start([sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    assert running.stdout is not None
    with running.stdout as output:
        assert output.readline() == "ready\n"


def call(host: Host, address: str, count: int = 0, limit_s: float = 30.0) -> str:
    """Send so many bytes; returns the last line of the error output."""
    argv = [sys.executable, "-c", CALL, address, str(count), str(limit_s)]
    return host.run(argv).stderr.rstrip("\n").rpartition("\n")[2]


def shapes(rig: Rig) -> str:
    """The shaping of both ends of all links."""
    names = [*(host.name for host in rig.hosts), rig.switch]
    return "".join(spaces.command("tc", "-n", name, "qdisc", "show") for name in names)


def hold() -> tuple[subprocess.Popen[str], str, int]:
    """Start a program with a rig; returns it, its host's name and a process id there."""
    program = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert program.stdout is not None
    name, pid = program.stdout.readline().split()
    return program, name, int(pid)


def end(program: subprocess.Popen[str], how: signal.Signals) -> None:
    program.send_signal(how)
    with program:
        program.wait(timeout=30)


def test_hosts_reach_each_other_and_count_bytes() -> None:
    with hosts(3) as rig:
        assert rig.ips == "10.213.7.1,10.213.7.2,10.213.7.3"
        first, second, third = rig.hosts
        serve(second)
        assert call(first, second.address, 10_000_000) == ""
        assert 10_000_000 < first.sent() < 10_500_000
        assert 10_000_000 < second.received() < 10_500_000
        assert second.sent() + third.sent() + third.received() < 1_000_000


def test_no_bytes_pass_a_cut_link() -> None:
    with hosts(2) as rig:
        first, second = rig.hosts
        serve(second)
        second.cut()
        assert "timed out" in call(first, second.address, limit_s=0.1)
        second.mend()
        assert call(first, second.address) == ""


def test_both_directions_of_a_link_are_shaped() -> None:
    with hosts(2, rate="200mbit") as rig:
        assert shapes(rig).count("rate 200Mbit") == 4
        rig.hosts[0].shape("1gbit")
        rig.hosts[1].shape(None)
        rig.hosts[1].shape(None)
        shown = shapes(rig)
        assert (shown.count("rate 1Gbit"), shown.count("tbf")) == (2, 2)
        with pytest.raises(RigError, match="fast"):
            rig.hosts[0].shape("fast")


def test_error_inside_a_rig_leaves_nothing() -> None:
    names, pids = [], []

    def work() -> None:
        with hosts(1) as rig:
            names.append(rig.hosts[0].name)
            running = rig.hosts[0].start(["sh", "-c", "sleep 600 & wait"])
            wait_until(lambda: len(spaces.inhabitants(names[0])) == 2, "the shell and its child")
            pids.extend(spaces.inhabitants(names[0]))
            assert running.pid in pids
            raise LookupError

    with pytest.raises(LookupError):
        work()
    wait_until(lambda: not any(map(is_running, pids)), "the end of both")
    assert names[0] not in spaces.command("ip", "netns", "list")


def test_process_that_left_its_group_is_killed_too() -> None:
    with hosts(1) as rig:
        host = rig.hosts[0]
        script = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
        fork = f"import os\nif not os.fork(): exec({script!r})"
        ended = host.start([sys.executable, "-c", fork], stdout=subprocess.PIPE)
        with ended:
            assert ended.stdout is not None
            pid = int(ended.stdout.readline())
        assert spaces.inhabitants(host.name) == [pid]
    wait_until(lambda: not is_running(pid), "its end")


def test_sigterm_leaves_nothing() -> None:
    program, name, pid = hold()
    end(program, signal.SIGTERM)
    assert not is_running(pid)
    assert name not in spaces.command("ip", "netns", "list")


def test_next_rig_removes_remains_of_a_killed_program() -> None:
    program, name, pid = hold()
    end(program, signal.SIGKILL)
    assert name in spaces.command("ip", "netns", "list")
    with hosts(1) as mine:
        named = spaces.command("ip", "netns", "list")
        assert name not in named
        assert mine.hosts[0].name in named
        # another rig does not touch this one, whose process is alive
        assert spaces.sweep() == []
    wait_until(lambda: not is_running(pid), "the end of what the program had started")


def test_process_that_exceeds_its_limit_is_killed() -> None:
    with hosts(1) as rig:
        with pytest.raises(subprocess.TimeoutExpired):
            rig.hosts[0].run(["sleep", "600"], timeout_s=0.1)
        assert spaces.inhabitants(rig.hosts[0].name) == []


def test_process_gets_the_environment_and_more() -> None:
    with hosts(1) as rig:
        shown = rig.hosts[0].run(["sh", "-c", "echo $HOME $MORE"], {"MORE": "of it"})
    assert shown.stdout == f"{os.environ['HOME']} of it\n"


def test_more_hosts_than_addresses_are_refused() -> None:
    with pytest.raises(RigError, match="got 255 hosts, expected 1 to 254"), hosts(255):
        pass


# -- `fleetlight doctor` measures a link of known rate


def test_link_rate_is_measured_and_its_consequence_reported() -> None:
    with hosts(2, rate="100mbit") as rig:
        options = ["--ips", rig.ips, "--seconds", "0.5"]
        command = [sys.executable, "-m", "fleetlight.cli.fleetlight", "doctor", *options]
        running = [host.start(command, stdout=subprocess.PIPE) for host in rig.hosts]
        texts = [process.communicate(timeout=60)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0]
    for text in texts:
        rates = [float(rate) for rate in re.findall(r" ms +(\S+) Mbit/s +open", text)]
        assert len(rates) == 2
        # of 100: minus the overhead of TCP and Ethernet, plus a first burst
        assert all(80 < rate < 130 for rate in rates)
        assert "cable0" in text
        assert "MB of gradients take" in text
        assert "compression='int8'" in text


# -- one command on each of several hosts


def test_each_host_runs_the_command_with_its_own_arguments(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["--hosts", "2", "--", "echo", "{i} of", "{ips} is {ip}, {}"]) == 0
    output = capfd.readouterr().out
    assert "[host 0] 0 of 10.213.7.1,10.213.7.2 is 10.213.7.1, {}\n" in output
    assert "[host 1] 1 of 10.213.7.1,10.213.7.2 is 10.213.7.2, {}\n" in output
    assert "host 1 (10.213.7.2): exit code 0, sent 0.0 MB, received 0.0 MB\n" in output


def test_first_failure_is_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--rate", "1gbit", "--", "sh", "-c", "exit {i}"]) == 1
    assert "host 0 (10.213.7.1): exit code 0" in capfd.readouterr().out


def test_error_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--rate", "fast", "--", "true"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("rig: `tc ")
    assert error.count("\n") == 1
