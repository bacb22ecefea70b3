# SPDX-License-Identifier: Apache-2.0
"""`ProcessStatus`: the file in which a process reports to the launcher that started it.

The launcher names the file in `FLEET_ERROR_FILE`. A process rewrites the file at each change of
its status. The launcher reads it when the process has exited, or before it sends a signal.
"""

from __future__ import annotations

import pathlib
import time

import msgspec

from fleetlight.files.atomic import replace_file


class Stop(msgspec.Struct, frozen=True):
    """Where a job that stopped on request can resume."""

    step: int
    folder: str


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of one process."""

    #: when it was written, by the monotonic clock, which all processes of a machine share
    at: float | None = None
    #: the error that ends the process
    error: str | None = None
    #: the process fails only because a peer did
    caused_by_peer: bool = False
    #: the script has called `fleet.init`
    has_joined: bool = False
    #: the process would fail again with the same error
    permanent: bool = False
    #: the launcher may restart only this process if a signal ends it
    restartable: bool = False
    #: the others continue without the process
    expendable: bool = False
    #: the process saves when it receives SIGTERM
    saves_at_sigterm: bool = False
    #: the process is about to disconnect from the servers
    saying_goodbye: bool = False
    #: the process has disconnected from the job
    left_job: bool = False
    #: the script has ended; the process is about to exit
    exiting: bool = False
    #: where the job can resume, once the process has stopped on request
    stopped: Stop | None = None


#: the status of a process that has reported nothing
UNKNOWN = ProcessStatus()


def read(path: str) -> ProcessStatus:
    """The status in a file, or `UNKNOWN` if no valid status is there."""
    try:
        return msgspec.json.decode(pathlib.Path(path).read_bytes(), type=ProcessStatus)
    except (OSError, msgspec.MsgspecError):
        return UNKNOWN


def write(path: str, status: ProcessStatus) -> None:
    """Write a status and its time atomically."""
    stamped = msgspec.structs.replace(status, at=time.monotonic())
    # several threads of a worker report
    replace_file(pathlib.Path(path), msgspec.json.encode(stamped), unique=True, durable=False)


def clear_saves_at_sigterm(path: str) -> None:
    """Clear `saves_at_sigterm` for a restarted process, which reports it again."""
    status = read(path)
    if status.saves_at_sigterm:
        write(path, msgspec.structs.replace(status, saves_at_sigterm=False))
