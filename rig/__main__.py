# SPDX-License-Identifier: Apache-2.0
"""Runs one command on each of several hosts.

python -m rig --hosts 2 --rate 200mbit -- fleetrun --ips {ips} train.py
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from rig.hosts import Host, Rig, hosts
from rig.spaces import RigError


def main(argv: Sequence[str] | None = None) -> int:
    """Make the hosts, run the command on each; the exit code of the first that failed."""
    options = _parse(argv)
    try:
        with hosts(options.hosts, options.rate) as rig:
            return _run(rig, options.command)
    except RigError as error:
        print(f"rig: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rig",
        description="Run one command on each of several hosts, all of them on this machine.",
        epilog="In the command, {i} is the host's number, {ip} its address, {ips} all addresses.",
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="how many (2)")
    parser.add_argument("--rate", help="of each link, such as 200mbit (default: unshaped)")
    parser.add_argument("command", nargs="+", help="after --; what to run")
    return parser.parse_args(argv)


def _run(rig: Rig, command: Sequence[str]) -> int:
    running = [_start(host, rig, command) for host in rig.hosts]
    for _, printer in running:
        printer.join()
    for host, (process, _) in zip(rig.hosts, running, strict=True):
        code = process.wait()
        passed = f"sent {host.sent() / 1e6:.1f} MB, received {host.received() / 1e6:.1f} MB"
        print(f"host {host.number} ({host.address}): exit code {code}, {passed}")
    return next((process.returncode for process, _ in running if process.returncode), 0)


def _start(
    host: Host, rig: Rig, command: Sequence[str]
) -> tuple[subprocess.Popen[str], threading.Thread]:
    argv = [_filled(word, host, rig) for word in command]
    argv[0] = _found(argv[0])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = host.start(argv, {"PYTHONUNBUFFERED": "1"}, **pipes)
    printer = threading.Thread(target=_print, args=(process, host.number), daemon=True)
    printer.start()
    return process, printer


def _filled(word: str, host: Host, rig: Rig) -> str:
    # not str.format: a command may have braces of its own
    for mark, value in (("{i}", str(host.number)), ("{ip}", host.address), ("{ips}", rig.ips)):
        word = word.replace(mark, value)
    return word


def _found(command: str) -> str:
    """What stands beside this Python, as fleetrun does, is preferred."""
    beside = Path(sys.executable).parent
    return shutil.which(command, path=str(beside)) or command


def _print(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    # the rig closes the pipe if it ends before the process has
    with contextlib.suppress(ValueError), process.stdout as lines:
        for line in lines:
            print(f"[host {number}] {line}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
