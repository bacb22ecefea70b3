# SPDX-License-Identifier: Apache-2.0
"""The clock of this process is an hour ahead, as on a machine without a time server."""

import time
from typing import Any

_AHEAD_S = 3600

_time, _time_ns, _clock, _clock_ns = (
    time.time,
    time.time_ns,
    time.clock_gettime,
    time.clock_gettime_ns,
)


def _shifted(read: Any, number: int) -> Any:
    return lambda kind: read(kind) + (number if kind == time.CLOCK_REALTIME else 0)


time.time = lambda: _time() + _AHEAD_S
time.time_ns = lambda: _time_ns() + _AHEAD_S * 10**9
time.clock_gettime = _shifted(_clock, _AHEAD_S)
time.clock_gettime_ns = _shifted(_clock_ns, _AHEAD_S * 10**9)
