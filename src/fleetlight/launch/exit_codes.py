# SPDX-License-Identifier: Apache-2.0
"""The exit codes of the processes of a job: all that an engine sees of their end. Pure."""

from __future__ import annotations

import signal

from fleetlight.errors import PeerError, is_lasting

#: the script has ended
DONE = 0
#: any other error of the script
ERROR = 1
#: a peer failed, and this process only with it; sysexits.h: EX_UNAVAILABLE
PEER_FAILED = 69
#: stopped on request with the job saved: run it again to resume; sysexits.h: EX_TEMPFAIL
RESUME_CODE = 75
#: the same start fails again until the user changes something; sysexits.h: EX_CONFIG
PERMANENT = 78
#: the command is not executable, or not found; the codes of shells
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def failure_code(*, permanent: bool, caused_by_peer: bool) -> int:
    """The code of a process that ends with an error."""
    if permanent:
        return PERMANENT
    return PEER_FAILED if caused_by_peer else ERROR


def error_code(error: BaseException) -> int:
    """The code of a process that ends with this uncaught error."""
    if isinstance(error, KeyboardInterrupt):
        return exit_code(-signal.SIGINT)
    return failure_code(permanent=is_lasting(error), caused_by_peer=isinstance(error, PeerError))


def exit_code(status: int) -> int:
    """An exit status as shells show it: 128 + n for -n, which stands for signal n."""
    return status if status >= 0 else 128 - status


def may_pass(status: int) -> bool:
    """True if the same command may succeed when it runs again, as far as its status says."""
    return status < 0 or status in (ERROR, PEER_FAILED)
