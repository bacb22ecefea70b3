# SPDX-License-Identifier: Apache-2.0
"""`fleetlight logs --follow`: what the processes of a job print, until none of them runs."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator

from fleetlight.errors import FleetError
from fleetlight.launch.backends import JobControl
from fleetlight.launch.screen import Prefixed

_EVERY_S = 1.0
_MEMBER = re.compile(r"(server|worker) \d+")


def follow(
    control: JobControl,
    job_id: str,
    member: str | None,
    wait: Callable[[], None] = lambda: time.sleep(_EVERY_S),
) -> Iterator[bytes]:
    """The output so far and what follows; each line after a prefix, unless it is of one member."""
    shown: list[bytes] = []
    readers: dict[str, _GrowingLog] = {}
    while True:
        states = control.status(job_id)
        # asked before the last look: nothing is printed after that
        is_over = all(state.is_over for state in states)
        names = [state.name for state in states]
        if member is not None and member not in names:
            # the control knows the names, and says so
            yield from control.logs(job_id, member)
            return
        for name in names if member is None else [member]:
            if name not in readers and _MEMBER.fullmatch(name):
                show = Prefixed(name, shown.append) if member is None else shown.append
                readers[name] = _GrowingLog(control, job_id, name, show)
        for reader in readers.values():
            # a process that has not started yet has no log
            with contextlib.nullcontext() if is_over else contextlib.suppress(FleetError):
                reader.read()
            if is_over:
                reader.finish()
        yield from shown
        shown.clear()
        if is_over:
            return
        wait()


class _GrowingLog:
    """The output of one process, read piece by piece."""

    def __init__(
        self, control: JobControl, job_id: str, name: str, show: Callable[[bytes], None]
    ) -> None:
        self._control, self._job_id, self._name, self._show = control, job_id, name, show
        self._start = 0

    def read(self) -> None:
        """Show what has been printed since the last call."""
        for data in self._control.logs(self._job_id, self._name, self._start):
            self._start += len(data)
            self._show(data)

    def finish(self) -> None:
        """Show a last line without a newline."""
        if isinstance(self._show, Prefixed):
            self._show.finish()
