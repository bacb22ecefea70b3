# SPDX-License-Identifier: Apache-2.0
"""`LogsExchange`: node 0 gets copies of the logs that other machines write.

They travel in the store, beside figures. Node 0 confirms how far it has each log, and a machine
sends what follows. A log that grows faster loses its middle on node 0, and a line there says so.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fleetlight.launch.machines.exchanged.heartbeats import Counters
from fleetlight.observe.log import logger

_NAME = re.compile(r"(?:worker|server)log\.\d{1,6}")
#: what a machine sends at a time, of all its logs together and at least of each
_MOST_BYTES, _LEAST_BYTES = 64 << 10, 4 << 10
#: how much of a log may be missing on node 0 before its middle is left out
_BEHIND_BYTES = 1 << 20
#: where node 0 confirms, by launcher and log, how much it has
_HAS = "logs_copied"


class _LogPart(msgspec.Struct):
    """A part of a log, from byte `start` on."""

    start: int
    data: bytes


class _SentLogs(msgspec.Struct):
    """What one machine sends."""

    launcher: int
    #: the host and the folder of these logs
    place: str
    logs: dict[str, _LogPart]


#: how many bytes of each log node 0 has, by launcher
Copied = dict[str, dict[str, int]]


class LogsExchange:
    """One machine's part in one start of the job."""

    def __init__(
        self,
        store: Counters,
        node: tuple[int, int],
        launcher: tuple[int, str],
        log_dir: Path,
        copied: Copied | None = None,
    ) -> None:
        """`node`: this one and their count. `launcher`: its number and host.

        `copied` is that of earlier starts, which this one continues.
        """
        self._store, (self._own, self._nodes) = store, node
        self._launcher, self._host = launcher
        self._folder = log_dir
        #: by node: its last message
        self._seen: dict[int, bytes] = {}
        self.copied: Copied = {} if copied is None else copied
        self._has_warned = False
        if self.copied:
            self._confirm()

    def bring(self, *, is_last: bool = False) -> None:
        """Send what is new, or on node 0 receive it; `is_last`: first of all the ends of logs."""
        if self._own:
            self._send(0 if is_last else _BEHIND_BYTES)
        else:
            for node in range(1, self._nodes):
                self._receive(node)

    def _send(self, behind: int) -> None:
        has = self._confirmed()
        sizes = {name: size for name, size in self._sizes().items() if size > has.get(name, 0)}
        if not sizes:
            return
        most = max(_LEAST_BYTES, _MOST_BYTES // len(sizes))
        logs: dict[str, _LogPart] = {}
        for name, size in sizes.items():
            start = has.get(name, 0)
            if size - start > max(behind, most):
                start = size - most
            with contextlib.suppress(OSError), (self._folder / name).open("rb") as file:
                file.seek(start)
                logs[name] = _LogPart(start, file.read(most))
        place = f"{self._host}:{self._folder}"
        message = msgspec.json.encode(_SentLogs(self._launcher, place, logs))
        self._store.set(f"logs/{self._own}", message.decode())

    def _confirmed(self) -> Mapping[str, int]:
        if not self._store.check([_HAS]):
            return {}
        return msgspec.json.decode(self._store.get(_HAS), type=Copied).get(str(self._launcher), {})

    def _sizes(self) -> dict[str, int]:
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            return {one.name: one.stat().st_size for one in entries if _NAME.fullmatch(one.name)}
        return {}

    def _receive(self, node: int) -> None:
        key = f"logs/{node}"
        if not self._store.check([key]):
            return
        data = self._store.get(key)
        if data == self._seen.get(node):
            return
        self._seen[node] = data
        message = msgspec.json.decode(data, type=_SentLogs)
        copied = self.copied.setdefault(str(message.launcher), {})
        for name, part in message.logs.items():
            # a name from another machine must not lead out of the folder
            if _NAME.fullmatch(name):
                text = _text_after(copied.get(name), part, f"{message.place}/{name}")
                self._append(name, text)
                copied[name] = max(copied.get(name, 0), part.start + len(part.data))
        self._confirm()

    def _confirm(self) -> None:
        self._store.set(_HAS, msgspec.json.encode(self.copied).decode())

    def _append(self, name: str, text: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(self._folder / name, flags, 0o644), "wb") as file:
                file.write(text)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("logs of other machines are not copied to %s: %s", name, error)


def _text_after(has: int | None, part: _LogPart, place: str) -> bytes:
    """What to append to a copy that has so many bytes; None: it is new."""
    note = "" if has is not None else f"--- copied from {place} ---\n"
    has = has or 0
    if part.start > has:
        note += f"\n--- {part.start - has:,} bytes are only in {place} ---\n"
    return note.encode() + part.data[max(0, has - part.start) :]
