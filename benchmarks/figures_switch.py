# SPDX-License-Identifier: Apache-2.0
"""`FiguresSwitch`: turns the recording of figures, and the reading of a page, off and on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np


class FiguresSwitch:
    """One byte in a file, which all processes of a job look at; on at first.

    Each process keeps the CPU seconds that its figures take in a file beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        is_new = not path.exists()
        self._state = np.memmap(path, np.uint8, "w+" if is_new else "r+", shape=(1,))
        if is_new:
            self.turn(on=True)

    def turn(self, *, on: bool) -> None:
        """Turn it on or off."""
        self._state[0] = on

    def spent_s(self) -> list[float]:
        """The CPU seconds of figures so far, in each process."""
        files = self._path.parent.glob(f"{self._path.name}.*")
        return [float(np.fromfile(file, np.float64).sum()) for file in files]

    def install(self) -> None:
        """From now on this process records figures only while it is on.

        What is counted meanwhile is in the next record.
        """
        from fleetlight.observe.figures.recorder import FigureRecorder

        spent, record = self._spent(), FigureRecorder.record

        def recorded(recorder: FigureRecorder) -> None:
            if self._state[0]:
                before = time.thread_time()
                record(recorder)
                spent[0] += time.thread_time() - before

        mock.patch.object(FigureRecorder, "record", recorded).start()

    def install_in_page(self) -> None:
        """From now on the page of this process reads figures only while it is on."""
        from fleetlight.dashboard.feed import JobFeed

        spent, poll, began = self._spent(), JobFeed.poll, time.process_time()

        def polled(feed: JobFeed) -> bool:
            # all that this process does is for the page
            spent[0] = time.process_time() - began
            return bool(self._state[0]) and poll(feed)

        mock.patch.object(JobFeed, "poll", polled).start()

    def _spent(self) -> Any:
        return np.memmap(f"{self._path}.{os.getpid()}", np.float64, "w+", shape=(1,))
