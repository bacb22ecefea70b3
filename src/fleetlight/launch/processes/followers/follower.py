# SPDX-License-Identifier: Apache-2.0
"""`Follower`: a process that reads the log folder of a job; it ends with the launcher."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from fleetlight.launch.processes.child import Child, Reaper
from fleetlight.roles.password import PASSWORD, PASSWORD_FILE

_POLL_S = 0.01
#: secrets of the job, which its followers need not
_SECRETS = ("FLEET_TOKEN", PASSWORD, PASSWORD_FILE)


class Follower:
    """A command of `fleetlight`, as a process of its own."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        reaper: Reaper,
        output: int | None = None,
        keep: Collection[int] = (),
    ) -> None:
        """Without `output` it writes where this process does."""
        command = (sys.executable, "-m", "fleetlight", *arguments)
        variables = {name: value for name, value in environment.items() if name not in _SECRETS}
        self._child = Child(command, variables, output, reaper, keep)

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        self._child.ask(signal.SIGTERM)

    def end(self, within_s: float) -> None:
        """Wait until it ends; kill it after this time."""
        deadline = time.monotonic() + within_s
        while self._child.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._child.end()
