# SPDX-License-Identifier: Apache-2.0
"""`ExpectedRows`: tells servers which rows will be read soon, so that their disks begin.

For tables that have rows in files. A step then waits less for the disk. Nothing depends on it: a
server that does not know reads all rows when it is asked for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetlight.kernels import Deduped
from fleetlight.ps import messages as m
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import PREFETCH, Request, SentRequests


class ExpectedRows:
    """The training thread sends without waiting; the next call receives the empty replies."""

    def __init__(self, client: Client) -> None:
        self._client = client
        #: the tables with rows in files
        self._tables = {n for n, table in enumerate(client.plan.tables) if table.memory}
        self._sent: SentRequests | None = None

    def tables_in_files(self, tables: Mapping[int, object]) -> list[int]:
        """Those of the tables that have rows in files."""
        return [number for number in tables if number in self._tables]

    def expect(self, ids: Mapping[int, Deduped]) -> None:
        """Send the distinct ids of some tables."""
        sent, self._sent = self._sent, None
        if sent is not None:
            self._client.replies_to(sent)
        requests: dict[int, Request] = {}
        for server in range(self._client.server_num):
            mine = {n: its.ids[its.slice_of(server)] for n, its in ids.items()}
            tables = [m.TablePull(n, insert=False) for n, its in mine.items() if len(its)]
            if tables:
                arrays = [mine[one.table] for one in tables]
                requests[server] = m.Pull(tables, dense=False, soon=True), arrays
        self._sent = self._client.send(PREFETCH, requests)
