# SPDX-License-Identifier: Apache-2.0
"""Runs scripts in forks of a process that has loaded torch, which takes a script some seconds.

A script is the main program of its process and ends as Python ends: with all exit handlers, and
with the exit status that Python gives it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping


class WarmScript:
    """What tests use of `subprocess.Popen`."""

    returncode: int

    def __init__(self, code: str, env: Mapping[str, str]) -> None:
        self._output, output = os.pipe()
        self._status, status = os.pipe()
        request = json.dumps([code, dict(env), os.getcwd()]).encode()
        socket.send_fds(_server(), [request], [output, status])
        os.close(output)
        os.close(status)

    def communicate(self) -> tuple[str, None]:
        """Wait for the end; returns what the script printed."""
        with open(self._output) as output, open(self._status) as status:
            printed = output.read()
            self.returncode = int(status.read())
        return printed, None


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    atexit.register(server.wait)
    atexit.register(ours.close)  # ends the server
    return ours


def _next_script(channel: socket.socket) -> str:
    """Serve until this process is the fork for a script; returns its code."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, files, *_ = socket.recv_fds(channel, 1 << 17, 2)
        if not request:
            sys.exit()
        output, status = files
        if os.fork() == 0:
            break
        os.close(output)
        os.close(status)
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    script = os.fork()
    if script:
        # waits and reports, as the parent of any process does
        os.close(output)
        ended = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
        os.write(status, str(ended).encode())
        os._exit(0)
    os.close(status)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    code, environment, folder = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c"]
    return str(code)


if __name__ == "__main__":
    import torch  # noqa: F401

    exec(compile(_next_script(socket.socket(fileno=int(sys.argv[1]))), "<string>", "exec"))
