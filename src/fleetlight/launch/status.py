# SPDX-License-Identifier: Apache-2.0
"""`ProcessStatus`: what a process of a job tells the launcher that started it, in a file.

The launcher names the file in `FLEET_ERROR_FILE`. A process writes all of its status at each
change; a launcher reads it when the process has ended, or before it sends a signal.
"""

from __future__ import annotations

import pathlib
import time

import msgspec

from fleetlight.files.atomic import replace_file

#: the exit code of a process that has saved what the job needs to resume: "try again later"
RESUME_CODE = 75


class Stop(msgspec.Struct, frozen=True):
    """A job was asked to stop, and did."""

    step: int
    folder: str


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of one process, as it tells it."""

    #: when it was written, by the monotonic clock, which all processes of a machine share
    at: float | None = None
    #: the error that ends the process
    error: str | None = None
    #: the process fails only because a peer did
    caused_by_peer: bool = False
    #: the process would fail again with the same error
    permanent: bool = False
    #: the launcher may start the process again alone, should a signal end it
    restartable: bool = False
    #: the others continue without the process
    expendable: bool = False
    #: the process saves when it receives SIGTERM
    saves_at_sigterm: bool = False
    #: the process is about to say goodbye to the servers
    saying_goodbye: bool = False
    #: the process has said goodbye to the job
    left_job: bool = False
    #: the script is over; only the exit code is to come
    exiting: bool = False
    #: where the job can resume, once it was asked to stop and has saved
    stopped: Stop | None = None


#: what a process has told that has told nothing
UNKNOWN = ProcessStatus()


def read(path: str) -> ProcessStatus:
    """The status in a file; `UNKNOWN` where there is none that can be read."""
    try:
        return msgspec.json.decode(pathlib.Path(path).read_bytes(), type=ProcessStatus)
    except (OSError, msgspec.MsgspecError):
        return UNKNOWN


def write(path: str, status: ProcessStatus) -> None:
    """Put a status, with the time, into a file; a reader sees this one or the one before."""
    stamped = msgspec.structs.replace(status, at=time.monotonic())
    replace_file(pathlib.Path(path), msgspec.json.encode(stamped), durable=False)


def clear_saves_at_sigterm(path: str) -> None:
    """A new process is about to write this file, and has yet to tell that it saves."""
    status = read(path)
    if status.saves_at_sigterm:
        write(path, msgspec.structs.replace(status, saves_at_sigterm=False))
