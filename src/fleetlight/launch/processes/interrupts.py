# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and friends, noted instead of acted upon: the supervisor decides what they mean."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """An interrupt came while nothing was running yet."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


class Interrupts:
    """While entered, records SIGINT, SIGTERM and SIGHUP in the order they came."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raise Interrupted if one has come."""
        if self.seen:
            raise Interrupted(self.seen[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup has asked for SIGHUP to be ignored; that stays so
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
