# SPDX-License-Identifier: Apache-2.0
"""Lets servers write and read the files of tables, in a shared folder or through worker 0.

Only worker 0 sends these requests, on a lane of their own, so that training continues.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetlight.checkpoint import Checkpoint, FileEntry, FileTarget
from fleetlight.errors import CorruptCheckpointError, PeerError
from fleetlight.fleet.checkpoints.save_options import WORKER0
from fleetlight.ps import messages as m
from fleetlight.ps.placement import buckets_of
from fleetlight.ps.tables.table_file import TableReader, table_errors
from fleetlight.ps.worker.client import Client
from fleetlight.store import is_url, store_at

LANE = "checkpoint"
#: bytes of a file in one message
_PIECE_BYTES = 8 << 20
#: bytes per second of the slowest disk: the deadline of a request allows for it
_MIN_BYTES_PER_S = 4 << 20

Saved = Mapping[int, m.Saved]


class TableFiles:
    """The files of tables on all servers, for worker 0."""

    def __init__(self, client: Client, deadline_s: float) -> None:
        self._client = client
        self._deadline_s = deadline_s

    def ask_all(self, message: m.Message, nbytes: int = 0) -> Mapping[int, Any]:
        """Send a request to every server; the deadline allows for so many bytes."""
        requests = dict.fromkeys(range(self._client.server_num), (message, ()))
        return self.ask(requests, nbytes)

    def ask(self, requests: Mapping[int, Any], nbytes: int = 0) -> Mapping[int, Any]:
        """Send a request to each of some servers; returns the messages of their replies."""
        limit_s = self._deadline_s + nbytes / _MIN_BYTES_PER_S
        replies = self._client.ask(LANE, requests, limit_s)
        return {server: reply.message for server, reply in replies.items()}

    def drop(self) -> None:
        """Let the servers, if they can be reached, free files of a finished save or load."""
        with contextlib.suppress(PeerError):
            self.ask_all(m.DropSnapshot())

    def table_bytes(self) -> int:
        """The bytes of tables on the largest server."""
        return max(sum(counted.nbytes.values()) for counted in self._client.metrics())

    def save(self, target: FileTarget, via: str, step: int) -> tuple[Saved, list[FileEntry]]:
        """Write all tables; returns the reply of each server, and the files that they wrote."""
        if via == WORKER0:
            saved = self.ask_all(m.Save("", "", step), self.table_bytes())
            for server, file in files_of(saved):
                self._receive_file(server, file, target)
            return saved, []
        with _token(target.location) as token:
            message = m.Save(target.location, token, step)
            saved = self.ask_all(message, self.table_bytes())
        return saved, [FileEntry(f.name, f.bytes, f.sha256) for _, f in files_of(saved)]

    def send(self, saved: Checkpoint, files: Sequence[tuple[int, str]]) -> dict[int, list[str]]:
        """Send every server the files with rows of its own; returns their names by server."""
        sent: dict[int, list[str]] = {n: [] for n in range(self._client.server_num)}
        for name, number in {name: number for number, name in files}.items():
            with table_errors(self._client.plan.tables[number].name):
                path = saved.unverified(name)
                reader = TableReader(path)
            for server, names in sent.items():
                first, stop = reader.span(buckets_of(server, self._client.server_num))
                if first < stop:
                    self._send_file(server, path)
                    names.append(name)
        return sent

    def _send_file(self, server: int, path: Path) -> None:
        with path.open("rb") as file:
            for offset in itertools.count(0, _PIECE_BYTES):
                data = np.frombuffer(file.read(_PIECE_BYTES), np.uint8)
                if not len(data):
                    return
                self._client.ask(LANE, {server: (m.WriteFile(path.name, offset), [data])})

    def _receive_file(self, server: int, file: m.TableFile, target: FileTarget) -> None:
        with target.create(file.name) as sink:
            for piece in self._pieces(server, file):
                sink.write(piece)
        entry = sink.entry
        if entry.sha256 != file.sha256:
            raise CorruptCheckpointError(
                f"{file.name} changed in transit from server {server} to {target.location}: got "
                f"{entry.bytes} bytes with sha256 {entry.sha256}, expected {file.bytes} bytes with "
                f"sha256 {file.sha256}; save again"
            )

    def _pieces(self, server: int, file: m.TableFile) -> Iterator[memoryview]:
        offset = 0
        while offset < file.bytes:
            message = m.ReadFile(file.name, offset, _PIECE_BYTES)
            [piece] = self._client.ask(LANE, {server: (message, ())})[server].arrays
            if not len(piece):
                return
            offset += len(piece)
            yield piece.data


@contextlib.contextmanager
def _token(location: str) -> Iterator[str]:
    """The name of a file there, by which a server sees that it has the same folder or bucket."""
    token = f"token-{secrets.token_hex(8)}"
    if is_url(location):
        store = store_at(location)
        store.put(token, b"")
        try:
            yield token
        finally:
            store.delete([token])
        return
    path = Path(location, token)
    path.touch()
    try:
        yield token
    finally:
        path.unlink()


def files_of(saved: Saved) -> list[tuple[int, m.TableFile]]:
    """All files, each with its server."""
    return [(server, file) for server, one in saved.items() for file in one.files]
