# SPDX-License-Identifier: Apache-2.0
"""What a user can do after a failure, in one sentence. Pure."""

from __future__ import annotations

import signal

from fleetlight.launch.exit_codes import PEER_FAILED, PERMANENT, exit_code
from fleetlight.launch.processes.failure import JobFailure

_AGAIN = "then start the job again"
#: by exit code; 128 + n for signal n
_SIGNALS = {
    signal.SIGKILL: f"if you have not killed it, look for out of memory in dmesg, {_AGAIN}",
    signal.SIGSEGV: "native code has crashed: the log has the stacks of its threads",
    signal.SIGABRT: "native code has ended the process: the log has the stacks of its threads",
    signal.SIGBUS: f"give the machine or the container more shared memory (/dev/shm), {_AGAIN}",
    signal.SIGILL: "install packages that are built for this processor",
}
_BY_CODE = {exit_code(-number): sentence for number, sentence in _SIGNALS.items()}


def remedy(failure: JobFailure, log_dir: str, checkpoint: str | None) -> str:
    """The sentence; "" where the failure itself says all."""
    if failure.stopped or failure.interrupted or not failure.log:
        return ""
    sentence = _sentence(failure, log_dir)
    if checkpoint is not None and not _is_permanent(failure):
        return f"{sentence}; with --resume it continues from the last save in {checkpoint}"
    return sentence


def _sentence(failure: JobFailure, log_dir: str) -> str:
    if failure.code in _BY_CODE:
        return _BY_CODE[failure.code]
    if failure.consequence or failure.code == PEER_FAILED:
        return (
            f"no process has failed on its own: the logs in {log_dir} show what the process did "
            "last that the error names"
        )
    if _is_permanent(failure):
        return f"a restart fails in the same way: correct what the error names, {_AGAIN}"
    if not failure.error:
        return "the script exited with this code itself; see its log"
    where = " where the traceback ends" if failure.traceback else ""
    return f"correct the script or its data{where}, {_AGAIN}"


def _is_permanent(failure: JobFailure) -> bool:
    return not failure.may_restart or failure.code == PERMANENT
