# SPDX-License-Identifier: Apache-2.0
"""The program of a template: loads modules once, then forks the processes of a job.

`template.py` puts this folder on the path of `python script.py`, so Python imports this file before
it runs the script. The template ends here. Each fork returns from here, and Python runs the script
in it as in any other process: `__main__`, `sys.argv`, `sys.path` and the exit are Python's own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_HERE = os.path.dirname(__file__)


def _fork_members(channel: int, request: dict[str, Any]) -> dict[str, Any]:
    """Fork a process for each member; return in the forks only, with their member."""
    pids: list[int] = []
    try:
        _load(request["modules"], request["folder"])
        if _is_silent() and _has_one_thread():
            started, start = os.pipe()
            for member in request["members"]:
                pid = os.fork()
                if not pid:
                    os.close(started)
                    return {**member, "start": start}
                pids.append(pid)
            os.close(start)
            if all(os.read(started, 1) for _ in pids):
                os.write(channel, json.dumps(pids).encode() + b"\n")
                os._exit(0)
    except BaseException:
        traceback.print_exc()
    for pid in pids:
        os.kill(pid, _SIGKILL)
    os._exit(1)


def _load(modules: list[str], folder: str) -> None:
    """Import the modules as the script in `folder` would."""
    sys.path.remove(_HERE)
    sys.path_importer_cache.pop(_HERE, None)
    is_first = not getattr(sys.flags, "safe_path", False)
    if is_first:
        sys.path.insert(0, folder)
    collects = gc.isenabled()
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    # modules stay until the exit, so no process needs to examine their objects
    gc.freeze()
    if collects:
        gc.enable()
    if is_first:
        sys.path.remove(folder)


def _is_silent() -> bool:
    """False where the imports wrote a message, which each process must show in its own log."""
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fstat(1).st_size + os.fstat(2).st_size == 0


def _has_one_thread() -> bool:
    """False if other threads would be missing in the forks; those of OpenBLAS end at a fork."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _become(channel: int, request: dict[str, Any], member: dict[str, Any]) -> None:
    """Turn a fork into the process of a member, once the launcher has adopted it."""
    os.setsid()
    os.write(member["start"], b".")
    if not os.read(channel, 1):
        os._exit(1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != request["launcher"]:
        os._exit(1)
    os.dup2(member["output"], 1)
    os.dup2(member["output"], 2)
    outputs = {each["output"] for each in request["members"]}
    for descriptor in {channel, member["start"], *outputs}:
        os.close(descriptor)
    # variables that Python or the modules have set stay
    for name in ("FLEET_TEMPLATE", "PYTHONPATH"):
        del os.environ[name]
    os.environ.update(member["environment"])
    _make_distinct()


def _make_distinct() -> None:
    """Set what differs between processes that start by themselves."""
    if sys.stdout.isatty() and not sys.stdout.write_through:  # type: ignore[union-attr]
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _run() -> None:
    channel = int(os.environ["FLEET_TEMPLATE"])
    told = b""
    while not told.endswith(b"\n"):
        told += os.read(channel, 1 << 16) or os._exit(1)
    request = json.loads(told)
    member = _fork_members(channel, request)
    try:
        _become(channel, request, member)
    except BaseException:
        # Python would run the script after an error here
        traceback.print_exc()
        os._exit(1)


if "FLEET_TEMPLATE" in os.environ:
    _run()
    # Python's own one; without one, the error that Python expects in this case
    del sys.modules["sitecustomize"]
    importlib.import_module("sitecustomize")
