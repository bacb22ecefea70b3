# SPDX-License-Identifier: Apache-2.0
"""What processes tell of a graceful stop: that they can, and that they have."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal

#: how a process ends that has saved what the job needs to go on: for a shell, "try again later"
RESUME_CODE = 75


@dataclasses.dataclass(frozen=True)
class Stop:
    """A job was asked to stop, and did."""

    step: int
    folder: str


def is_killed(status: int) -> bool:
    """True for the status of a process that was ended from outside."""
    # An abort comes from inside, often because a peer has gone.
    return status < 0 and status != -signal.SIGABRT


def read_stop(error_file: str, status: int) -> Stop | None:
    """What a process has told that stopped; None when its end was another.

    One that was killed behind that word has saved, too.
    """
    if status != RESUME_CODE and not is_killed(status):
        return None
    try:
        told = json.loads(pathlib.Path(error_file).read_text())["stopped"]
        return Stop(int(told["step"]), str(told["folder"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def stops(error_file: str) -> bool:
    """True for the error file of a process that saves when it gets SIGTERM."""
    return pathlib.Path(f"{error_file}.stops").exists()


def forget_stops(error_file: str) -> None:
    """Another process writes that file from now on."""
    pathlib.Path(f"{error_file}.stops").unlink(missing_ok=True)


def told(stop: Stop) -> str:
    """What the user reads."""
    return (
        f"stopped at step {stop.step}, saved in {stop.folder}; go on with fleetrun --checkpoint "
        f"{stop.folder} --resume and any number of processes"
    )
