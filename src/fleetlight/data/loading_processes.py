# SPDX-License-Identifier: Apache-2.0
"""The processes of a DataLoader when a job is asked to stop.

Slurm sends SIGTERM to all processes of a job. The job saves between two batches, so the processes
that load batches must survive until then.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from types import FrameType

#: seconds that such a process has left after SIGTERM; torch ends it before, with its loader
_LEFT_S = 120

_InitFunction = Callable[[int], object]


def surviving_sigterm(then: _InitFunction | None) -> _InitFunction | None:
    """A `worker_init_fn` for a DataLoader of this process, which calls `then`.

    Nothing changes where SIGTERM ends this process, too.
    """
    if not callable(signal.getsignal(signal.SIGTERM)):
        return then
    return functools.partial(_begin, then)


def _begin(then: _InitFunction | None, number: int) -> None:
    """Replace torch's handler, which is set before."""
    signal.signal(signal.SIGTERM, _end_later)
    if then is not None:
        then(number)


def _end_later(number: int, frame: FrameType | None) -> None:
    """End this process only if it is still there after a while."""
    # by default SIGALRM ends a process
    signal.alarm(_LEFT_S)
