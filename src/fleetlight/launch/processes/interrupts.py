# SPDX-License-Identifier: Apache-2.0
"""Record Ctrl-C and similar signals, for the supervisor to act on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """An interrupt arrived before the processes started."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


class Interrupts:
    """Records SIGINT, SIGTERM and SIGHUP in their order while the context is entered."""

    def __init__(
        self,
        *others: signal.Signals,
        react: Callable[[int], None] = lambda number: None,
        asks_to_end: bool = False,
    ) -> None:
        """`others` are recorded as well; `react` is called at each signal.

        `asks_to_end`: SIGINT counts as SIGTERM, at which the processes end in good order.
        """
        self.seen: list[int] = []
        self._others, self._react, self._asks_to_end = others, react, asks_to_end
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raise Interrupted after a signal."""
        if self.seen:
            raise Interrupted(self.seen[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._asks_to_end:
            number = signal.SIGTERM
        self.seen.append(number)
        self._react(number)

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *self._others):
            # nohup ignores SIGHUP, and so does fleetrun then
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
