# SPDX-License-Identifier: Apache-2.0
"""`HeldOutput`: shows output, but holds a traceback back until the cause of the failure is known.

If one process fails, the others fail with it, and each writes a traceback. The user has to see that
of the cause, which the launcher prints at the end of the job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from fleetlight.observe.console import without_control

#: how long a traceback is held back while its process runs on
_HOLD_S = 2.0
_STARTS = (b"Traceback (most recent call last)", b"Fatal Python error: ")
#: a line may begin with what ends a progress bar, which is shown, with a colour, and with the rank
#: that torch writes
_START = re.compile(
    rb"(?:\A|(?<=[\n\r]))(?:\x1b\[[0-?]*[ -/]*[@-ln-~])*"
    rb"(?P<start>(?:\x1b\[[\d;]*m)*(?:\[rank\d+\]: )?(?:"
    + b"|".join(re.escape(start) for start in _STARTS)
    + b"))"
)


class HeldOutput:
    """The output of one process on its way to the screen."""

    def __init__(
        self,
        show: Callable[[bytes], None],
        is_failing: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_failing`: True once it is known that the process, or the job, ends with an error."""
        self._show, self._is_failing, self._clock = show, is_failing, clock
        #: the traceback and all after it, and when it came; None: nothing is held
        self._held: bytes = b""
        self._since: float | None = None
        self._at_line_start = True

    def __call__(self, data: bytes) -> None:
        """Show data up to a traceback."""
        if self._since is not None:
            self._held += data
            if not self._is_traceback and not _is_part(self._held):
                self(self.discard())
            return
        start = self._find(data)
        if start is not None:
            self._held, self._since = data[start:], self._clock()
            data = data[:start]
        self._show_now(data)

    def _show_now(self, data: bytes) -> None:
        if not data:
            return
        # a sequence that only moves the cursor or hides it writes nothing
        if text := without_control(data):
            self._at_line_start = text.endswith((b"\n", b"\r"))
        self._show(data)

    def _find(self, data: bytes) -> int | None:
        """Offset of a traceback, even if its first line is still incomplete."""
        for found in _START.finditer(data):
            if found.start() or self._at_line_start:
                return found.start("start")
        last = data.rfind(b"\n") + 1
        return last if _is_part(data[last:]) and (last or self._at_line_start) else None

    @property
    def _is_traceback(self) -> bool:
        """False while only a part of a first line is held, which may be of another text."""
        return _START.match(self._held) is not None

    def pump(self) -> None:
        """Show what is held if the process has continued since then."""
        if self._since is None:
            return
        is_over = self._clock() - self._since >= _HOLD_S
        if not self._is_traceback or (is_over and not self._is_failing()):
            self.release()

    def release(self) -> None:
        """Show what is held: the job continues, or its end has another cause."""
        self._show_now(self.discard())

    def discard(self) -> bytes:
        """Forget what is held, and return it."""
        data, self._held, self._since = self._held, b"", None
        return data


def _is_part(line: bytes) -> bool:
    return bool(line) and any(start.startswith(line) for start in _STARTS)
