# SPDX-License-Identifier: Apache-2.0
"""`PublicationHandler`: a server's part in publishing rows during training."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fleetlight.errors import PublicationError
from fleetlight.ps.messages import (
    Changed,
    PublicationCut,
    PublicationRequest,
    PublicationTaken,
    PublicationWrite,
    PublicationWritten,
    PublishedFile,
)
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.tables import unordered_snapshot as sweep
from fleetlight.ps.tables.publishing.table_changes import TableCut
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Floats, Ids
from fleetlight.publication.row_file import write_rows
from fleetlight.store import ObjectStore, store_at

_BLOCK = 4 << 20


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A cut that may become a publication."""

    publication: str
    #: False: it has all rows
    is_delta: bool
    cuts: dict[int, TableCut]


class PublicationHandler:
    """Cuts the tables between two pushes, and writes what changed, or all rows.

    After a restart nothing is known of earlier publications, so the next one has all rows.
    """

    def __init__(
        self, server: int, state: ServerState, values_lock: SharedExclusiveLock, deadline_s: float
    ) -> None:
        self._server = server
        self._state = state
        self._values_lock = values_lock
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        #: the publication since which the tables have marked all changes
        self._since = ""
        self._pending: _Pending | None = None

    def changed(self, message: PublicationRequest) -> Reply:
        """What changed since the last publication."""
        with self._exclusively():
            self._settle(message.published)
            for number, table in enumerate(self._state.tables):
                if number not in message.tables:
                    table.stop_marking()
            tables = self._tables(message.tables)
            changes = [table.changes() for table in tables]
            is_complete = message.published == self._since and all(c.is_complete for c in changes)
            reply = Changed(
                is_complete,
                [len(one) for one in changes],
                [len(table) for table in tables],
                sum(table.nbytes for table in tables),
            )
        return reply, []

    def cut(self, message: PublicationCut) -> Reply:
        """Cut the tables, all at once."""
        with self._exclusively():
            self._settle("")
            tables = self._tables(message.tables)
            self._check_knows(message, tables)
            sweep.get_ready()
            is_delta = bool(message.since)
            with self._values_lock.exclusive():
                cuts = {
                    number: self._state.table(number).cut_changes(whole=not is_delta)
                    for number in dict.fromkeys(message.tables)
                }
                dense = self._state.dense.values()
            self._pending = _Pending(message.publication, is_delta, cuts)
        return PublicationTaken(), dense

    def write(self, message: PublicationWrite) -> Reply:
        """Write the files of the cut."""
        with self._exclusively():
            pending = self._pending
            if pending is None or pending.publication != message.publication:
                raise PublicationError(
                    f"server {self._server} has no cut of publication {message.publication}: it "
                    "was restarted, or another publisher has cut since; publish again"
                )
            store = store_at(message.url)
            files = [
                self._write(store, number, cut, pending.is_delta, message.prefix, form)
                for (number, cut), form in zip(pending.cuts.items(), message.forms, strict=True)
            ]
        return PublicationWritten(files), []

    def _write(
        self, store: ObjectStore, number: int, cut: TableCut, is_delta: bool, prefix: str, form: str
    ) -> PublishedFile:
        table = self._state.table(number)
        name = f"{prefix}{table.plan.name}.server{self._server}.parquet"
        removed = cut.removed if is_delta else np.empty(0, np.int64)
        with tempfile.TemporaryDirectory(prefix="fleet-publish-") as folder:
            path = Path(folder, "rows.parquet")
            counts = write_rows(path, table.plan.dim, form, _pieces(table, cut), removed)
            digest, size = _digest(path), path.stat().st_size
            store.put(name, path)
        return PublishedFile(number, name, size, digest, *counts)

    def _settle(self, published: str) -> None:
        """End the cut, if there is one; its changes belong to the next unless it was published."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        is_published = pending.publication == published
        for number in pending.cuts:
            self._state.table(number).settle_changes(published=is_published)
        if is_published:
            self._since = pending.publication

    def _check_knows(self, message: PublicationCut, tables: Sequence[Table]) -> None:
        is_complete = all(table.changes().is_complete for table in tables)
        if message.since and (message.since != self._since or not is_complete):
            raise PublicationError(
                f"server {self._server} does not know all changes since publication "
                f"{message.since}: it was restarted, or loaded a checkpoint; publish all rows"
            )

    def _tables(self, numbers: Sequence[int]) -> list[Table]:
        return [self._state.table(number) for number in numbers]

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._deadline_s):
            raise PublicationError(
                f"server {self._server} has been writing another publication for "
                f"{self._deadline_s:g} s; wait until it ends, and check the target"
            )
        try:
            yield
        finally:
            self._lock.release()


def _pieces(table: Table, cut: TableCut) -> Iterator[tuple[Ids, Floats]]:
    """The rows; pushes find memory for those that they keep for the cut."""
    cut.rows.make_room()
    for piece in table.published_pieces(cut):
        yield piece
        cut.rows.make_room()


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
