# SPDX-License-Identifier: Apache-2.0
"""A process is found again by its number and start, and no other one gets a signal."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from fleetlight.launch.process_identity import Presence, presence, send, start_of, this_system


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_has_one_start(child: subprocess.Popen[bytes]) -> None:
    start = start_of(child.pid)
    assert start is not None
    assert start == start_of(child.pid)
    own = start_of(os.getpid())
    assert own is not None
    assert own < start
    assert presence(child.pid, start, this_system()) is Presence.RUNNING


def test_a_process_that_has_ended_is_gone_before_it_is_reaped(
    child: subprocess.Popen[bytes],
) -> None:
    start = start_of(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_of(child.pid) == start
    assert not send(signal.SIGTERM, child.pid, start, os.getuid())
    assert presence(child.pid, start, this_system()) is Presence.ENDED
    child.wait()
    assert start_of(child.pid) is None
    assert presence(child.pid, start, this_system()) is Presence.ENDED


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Presence.RUNNING),
        ({"hostname": "other", "boot": "b"}, Presence.UNKNOWN),
        ({"namespace": "pid:[1]"}, Presence.UNKNOWN),
        ({"boot": "an earlier one"}, Presence.ENDED),
    ],
)
def test_a_number_is_valid_on_its_system(changes: dict[str, str], expected: Presence) -> None:
    system = msgspec.structs.replace(this_system(), **changes)
    pid = os.getpid()
    assert presence(pid, start_of(pid), system) is expected


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    pid, start = os.getpid(), start_of(os.getpid())
    assert start is not None
    assert presence(pid, start - 1, this_system()) is Presence.ENDED
    assert presence(pid, None, this_system()) is Presence.UNKNOWN


def no_descriptors(pid: int) -> int:
    raise OSError(errno.ENOSYS, "no such call")


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_signal_reaches_only_the_process_that_is_meant(
    has_descriptors: bool, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", no_descriptors)
    start, user = start_of(child.pid), os.getuid()
    assert start is not None
    assert not send(signal.SIGTERM, child.pid, start - 1, user)
    assert not send(signal.SIGTERM, child.pid, None, user)
    assert not send(signal.SIGTERM, child.pid, start, user + 1)
    # SIGTERM would have killed the process before; a job of a shell's background ignores SIGINT
    assert send(signal.SIGUSR1, child.pid, start, user)
    assert child.wait() == -signal.SIGUSR1
    assert not send(signal.SIGTERM, child.pid, start, user)
