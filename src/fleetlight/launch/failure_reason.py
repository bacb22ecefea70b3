# SPDX-License-Identifier: Apache-2.0
"""`FailureReason`: why a process failed, as JSON where engines look for it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Mapping

import msgspec

#: Kubernetes shows the last message of a container from here, and cuts it
_LOG, _LOG_VARIABLE, _LOG_BYTES = "/dev/termination-log", "FLEET_TERMINATION_LOG", 4096
_TORCHELASTIC_VARIABLE = "TORCHELASTIC_ERROR_FILE"


class FailureReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a process failed. The fields are those of the termination log."""

    #: None: the environment did not say
    role: str | None = None
    index: int | None = None
    #: the exit code
    code: int
    error: str
    #: the process fails only because a peer did
    caused_by_peer: bool = False
    #: the same start would fail again
    permanent: bool = False


def write_for_engines(
    reason: FailureReason,
    stack: str = "",
    env: Mapping[str, str] = os.environ,
    default_log: str = _LOG,
) -> None:
    """Write the reason where an engine asks for it; nothing where none does. May raise OSError."""
    torchelastic = env.get(_TORCHELASTIC_VARIABLE)
    if torchelastic:
        pathlib.Path(torchelastic).write_text(torchelastic_text(reason, stack, time.time()))
    log = env.get(_LOG_VARIABLE) or (default_log if os.access(default_log, os.W_OK) else "")
    if log and not (reason.caused_by_peer and _has_cause(pathlib.Path(log))):
        # in place: Kubernetes mounts the file
        pathlib.Path(log).write_bytes(termination_message(reason))


def torchelastic_text(reason: FailureReason, stack: str, now: float) -> str:
    """The error file of torch.distributed.elastic, as its own handler writes it."""
    extra = {"py_callstack": stack, "timestamp": str(int(now))}
    return json.dumps({"message": {"message": reason.error, "extraInfo": extra}})


def termination_message(reason: FailureReason) -> bytes:
    """The reason as JSON, with its error shortened until the message fits."""
    error = reason.error
    while len(data := msgspec.json.encode(reason)) > _LOG_BYTES:
        # an escaped character has at most six bytes
        error = error[: min(_LOG_BYTES, len(error) - 1 - (len(data) - _LOG_BYTES) // 6)]
        reason = msgspec.structs.replace(reason, error=f"{error}...")
    return data


def _has_cause(log: pathlib.Path) -> bool:
    """True if another process of the container has written the cause already."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return not msgspec.json.decode(log.read_bytes(), type=FailureReason).caused_by_peer
    return False
