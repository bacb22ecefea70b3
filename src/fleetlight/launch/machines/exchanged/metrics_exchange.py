# SPDX-License-Identifier: Apache-2.0
"""`MetricsExchange`: node 0 gets the metrics and events that other machines record.

They travel in the store, with the heartbeats of launchers: of each process the newest snapshot, and
the events that node 0 has not confirmed. Machines that share a log folder have all files already.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import msgspec

from fleetlight.launch.machines.exchanged.heartbeats import Counters
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.history import LineFollower
from fleetlight.observe.telemetry.recorder import ThinnedFile
from fleetlight.observe.telemetry.snapshot import EVENTS_PREFIX, FOLDER, SUFFIX

#: how many events of a file wait for node 0, if it is away
_MAX_EVENTS = 1000


class _RecordedLines(msgspec.Struct):
    """What one machine sends: lines by the name of their file."""

    number: int
    lines: dict[str, list[str]]


class MetricsExchange:
    """One machine's part in one start of the job."""

    def __init__(
        self, store: Counters, own: int, nodes: int, log_dir: Path, copies: Copies | None = None
    ) -> None:
        """`copies` are those of earlier starts, which this one continues."""
        self._store, self._own, self._nodes = store, own, nodes
        self._folder = log_dir / FOLDER
        self._number = 0
        self._followers: dict[str, LineFollower] = {}
        #: by name: the lines that node 0 lacks, each with the number of its first message
        self._waiting: dict[str, deque[tuple[int, str]]] = {}
        #: by node: the number of its last message
        self._seen: dict[int, int] = {}
        self.copies: Copies = {} if copies is None else copies
        self._has_warned = False

    def bring(self) -> None:
        """Send what is new, or on node 0 receive it."""
        if self._own:
            self._send()
        else:
            for node in range(1, self._nodes):
                self._receive(node)

    def _send(self) -> None:
        seen = f"metrics_seen/{self._own}"
        confirmed = int(self._store.get(seen)) if self._store.check([seen]) else 0
        lines = {name: self._newest(name, confirmed) for name in self._names()}
        lines = {name: some for name, some in lines.items() if some}
        if lines:
            self._number += 1
            message = msgspec.json.encode(_RecordedLines(self._number, lines))
            self._store.set(f"metrics/{self._own}", message.decode())

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.endswith(SUFFIX)]
        except FileNotFoundError:
            return []

    def _newest(self, name: str, confirmed: int) -> list[str]:
        follower = self._followers.setdefault(name, LineFollower(self._folder / name))
        count = _MAX_EVENTS if name.startswith(EVENTS_PREFIX) else 1
        waiting = self._waiting.setdefault(name, deque(maxlen=count))
        while waiting and waiting[0][0] <= confirmed:
            waiting.popleft()
        for line in follower.read().decode(errors="replace").splitlines():
            waiting.append((self._number + 1, line))
        return [line for _, line in waiting]

    def _receive(self, node: int) -> None:
        key = f"metrics/{node}"
        if not self._store.check([key]):
            return
        try:
            message = msgspec.json.decode(self._store.get(key), type=_RecordedLines)
        except msgspec.MsgspecError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("metrics of node %d cannot be read: %s", node, error)
            return
        if message.number == self._seen.get(node):
            return
        self._seen[node] = message.number
        for name, lines in message.lines.items():
            copy = self._copy(name)
            if copy is not None:
                copy.add(lines)
        # the machine may omit them from now on
        self._store.set(f"metrics_seen/{node}", str(message.number))

    def _copy(self, name: str) -> _Copy | None:
        # a name from another machine must not lead out of the folder
        if os.path.basename(name) != name or not name.endswith(SUFFIX):
            return None
        if name not in self.copies:
            path = self._folder / name
            self.copies[name] = None if path.exists() else _Copy(path)
        return self.copies[name]


class _Copy:
    """A file of another machine."""

    def __init__(self, path: Path) -> None:
        self._file = ThinnedFile(path)
        self._last: deque[str] = deque(maxlen=2 * _MAX_EVENTS)

    def add(self, lines: list[str]) -> None:
        """Append the lines that are new."""
        for line in lines:
            if line not in self._last:
                self._last.append(line)
                self._file.append(line.encode())


#: by name: a file that this machine writes for another, with its last lines; None: it has the file
#: already
Copies = dict[str, _Copy | None]
