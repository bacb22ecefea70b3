# SPDX-License-Identifier: Apache-2.0
"""`Publisher`: publishes what the servers have, in a thread of worker 0, during training."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping

from torch import Tensor

from fleetlight.errors import FleetError, PublicationError
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts.publishing import PublishOptions
from fleetlight.fleet.recording.process_metrics import note
from fleetlight.fleet.served.publishing.dense_values import (
    encoded,
    local_values,
    with_served,
    with_tied,
)
from fleetlight.fleet.served.publishing.target import PublicationTarget, prefix_of
from fleetlight.fleet.served.session import ServerSession
from fleetlight.kernels import table_seed
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.transport.interface import ReceivedReply
from fleetlight.publication.lease import RENEW_S, Lease
from fleetlight.publication.manifest import (
    Publication,
    PublicationManifest,
    PublishedTable,
    RowFile,
)
from fleetlight.publication.row_file import arrow
from fleetlight.store import store_at

LANE = "publication"
#: bytes per second of the slowest target: the deadline of a request allows for it
_MIN_BYTES_PER_S = 4 << 20
#: A reader that starts reads all deltas, so a base replaces them after so many.
_MAX_DELTAS = 360


class Publisher:
    """Publishes every few seconds, and once more when training ends.

    A publication that fails is logged, and what it had belongs to the next one.
    """

    def __init__(self, job: Job, session: ServerSession, options: PublishOptions) -> None:
        self._job, self._session, self._options = job, session, options
        arrow()
        plan = session.bound.plan
        self._forms = options.forms([table.name for table in plan.tables])
        self._tables = sorted(self._forms)
        store = store_at(options.url)
        self._lease = Lease.acquire(store, job.role.job)
        entries = [_entry(plan.tables[n], plan.seed, self._forms[n]) for n in self._tables]
        try:
            self._target = PublicationTarget(store, entries, options.every_s)
            # the servers mark changes from now on, or say why they cannot
            self._ask(m.PublicationRequest(self._tables, ""))
        except BaseException:
            # the next publisher need not wait
            with contextlib.suppress(FleetError):
                self._lease.release()
            raise
        self._loads = session.client.epoch
        self._cycle = threading.Lock()
        self._over = threading.Event()
        #: after the last publication: until then the lease is renewed
        self._is_released = threading.Event()
        #: the error of the last publication, None if it is complete
        self.error: Exception | None = None
        self._gate = session.trainer_guard.gate = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "fleet-publish"), (self._renew, "fleet-lease"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def manifest(self) -> PublicationManifest | None:
        """The last manifest, None before the first publication."""
        return self._target.manifest

    def publish_now(self) -> Publication:
        """Publish now; raises what goes wrong."""
        if self.is_over:
            raise PublicationError(
                f"publish_now: this publisher to {self._options.url} has stopped; call "
                "fleet.publish for another one"
            )
        return self._publish_once()

    def _publish_once(self) -> Publication:
        with self._cycle:
            try:
                made = self._publish()
            except Exception as error:
                self.error = error
                raise
            self.error = None
            return made

    def stop(self, *, publish: bool = True) -> None:
        """End; `publish` the last changes first."""
        if self._over.is_set():
            return
        self._over.set()
        publishes, renews = self._threads
        publishes.join()
        try:
            if publish:
                self._publish_once()
            self._ask(m.PublicationRequest([], self._published()))
            self._is_released.set()
            renews.join()
            self._lease.release()
        except FleetError as error:
            logger.error("the last publication to %s failed: %s", self._options.url, error)
        finally:
            self._is_released.set()
            self._session.trainer_guard.gate = None

    def abandon(self) -> None:
        """End silently, after a failure."""
        self._over.set()
        self._is_released.set()
        self._session.trainer_guard.gate = None

    def _run(self) -> None:
        due = time.monotonic() + self._options.every_s
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._options.every_s, time.monotonic())
            if self._job.replay.is_catching_up:
                # the script repeats what it did before this worker was restarted
                continue
            try:
                self.publish_now()
            except Exception as error:
                if not self._over.is_set():
                    logger.error(
                        "a publication to %s failed, and the next one has its changes: %s",
                        self._options.url,
                        error,
                    )

    def _renew(self) -> None:
        while not self._is_released.wait(RENEW_S):
            try:
                self._lease.renew()
            except PublicationError as error:
                logger.error("this job publishes no longer: %s", error)
                self.error = error
                self.abandon()
            except FleetError as error:
                logger.warning("the lease of %s was not renewed: %s", self._options.url, error)

    def _publish(self) -> Publication:
        if self._target.is_outdated:
            # it fails if another publisher has taken over
            self._lease.renew()
            self._target.start_over()
        since = self._since()
        number, publication = self._target.number + 1, secrets.token_hex(6)
        prefix = prefix_of(number, publication)
        values, step, now = self._cut(publication, since)
        files = self._write(publication, prefix)
        dense = self._target.put_dense(prefix, encoded(values))
        self._target.check_sees(files, dense)
        made = Publication(publication, number, since, step, now, dense, files)
        self._target.complete(made)
        self._target.prune(self._options.grace_s)
        kind = "a delta" if since else "a base"
        rows = sum(file.rows for file in files)
        removed = sum(file.removed for file in files)
        text = f"published number {number}, {kind} of {rows:,} rows"
        note(self._job.role, "publication", text, step)
        logger.debug(
            "published %s to %s: number %d, step %d, %d rows, %d removed",
            kind,
            self._options.url,
            number,
            step,
            rows,
            removed,
        )
        return made

    def _published(self) -> str:
        manifest = self._target.manifest
        return "" if manifest is None else manifest.newest.id

    def _since(self) -> str:
        """The publication that the next one follows; "" if it must have all rows."""
        loads = self._session.client.epoch
        if loads != self._loads:
            self._loads = loads
            self._target.begin_epoch()
        published = self._published()
        replies = self._ask(m.PublicationRequest(self._tables, published))
        states = [reply.message for reply in replies.values()]
        complete = all(isinstance(one, m.Changed) and one.is_complete for one in states)
        return published if published and complete and not self._is_long() else ""

    def _is_long(self) -> bool:
        """Whether the deltas have grown so much that a base is cheaper for readers."""
        manifest = self._target.manifest
        assert manifest is not None, "nothing is published"
        size = sum(delta.bytes for delta in manifest.deltas)
        limit = self._options.compact_at * manifest.base.bytes
        # an empty table has files of some bytes
        return len(manifest.deltas) >= _MAX_DELTAS or (bool(size) and size > max(limit, 1 << 16))

    def _cut(self, publication: str, since: str) -> tuple[dict[str, Tensor], int, float]:
        """Cut all servers between two steps of this worker: in sync mode, after the same step."""
        message = m.PublicationCut(publication, self._tables, since)
        deadline_s = self._job.group.deadline_s
        if not self._gate.acquire(timeout=deadline_s):
            raise PublicationError(
                f"a publication waited {deadline_s:g} s for the end of a step of worker 0"
            )
        try:
            replies = self._ask(message)
            values = with_served(local_values(self._job, self._session), self._session, replies)
            return with_tied(self._job, values), self._job.step, time.time()
        finally:
            self._gate.release()

    def _write(self, publication: str, prefix: str) -> list[RowFile]:
        forms = [self._forms[number] for number in self._tables]
        message = m.PublicationWrite(publication, self._options.url, prefix, forms)
        counted = self._session.client.metrics()
        nbytes = max(sum(one.nbytes.values()) for one in counted)
        tables = self._session.bound.plan.tables
        found = []
        for server, reply in sorted(self._ask(message, nbytes).items()):
            assert isinstance(reply.message, m.PublicationWritten), reply.message
            for file in reply.message.files:
                found.append(
                    RowFile(
                        tables[file.table].name,
                        server,
                        file.name,
                        file.bytes,
                        file.sha256,
                        file.rows,
                        file.removed,
                    )
                )
        return found

    def _ask(self, message: m.Message, nbytes: int = 0) -> Mapping[int, ReceivedReply]:
        limit_s = self._job.group.deadline_s + nbytes / _MIN_BYTES_PER_S
        return self._session.client.everywhere(message, LANE, limit_s)


def _entry(plan: TablePlan, seed: int, form: str) -> PublishedTable:
    how = plan.initializer
    return PublishedTable(
        plan.name,
        plan.dim,
        form,
        table_seed(seed, plan.name),
        (how.kind, how.a, how.b),
        plan.dtype,
    )
