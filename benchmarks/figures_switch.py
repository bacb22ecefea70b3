# SPDX-License-Identifier: Apache-2.0
"""`FiguresSwitch`: turns the recording of figures, and the reading of a page, off and on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class FiguresSwitch:
    """One byte in a file, which all processes of a job look at; on at first."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._state = np.memmap(path, np.uint8, "w+" if is_new else "r+", shape=(1,))
        if is_new:
            self.turn(on=True)

    def turn(self, *, on: bool) -> None:
        """Turn it on or off."""
        self._state[0] = on

    def install(self) -> None:
        """From now on this process records figures, or reads them for a page, only while it is on.

        What is counted meanwhile is in the next record.
        """
        from fleetlight.observe.figures.recorder import FigureRecorder

        self._guard(FigureRecorder, "record")

    def install_in_page(self) -> None:
        """As `install`, in the process of a page."""
        from fleetlight.dashboard.feed import JobFeed

        self._guard(JobFeed, "poll")

    def _guard(self, kind: type, name: str) -> None:
        method = getattr(kind, name)

        def only_while_on(self_: Any) -> Any:
            return method(self_) if self._state[0] else False

        setattr(kind, name, only_while_on)
