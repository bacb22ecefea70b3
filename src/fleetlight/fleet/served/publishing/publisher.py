# SPDX-License-Identifier: Apache-2.0
"""`Publisher`: publishes what the servers have, in a thread of worker 0, during training."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import save
from torch import Tensor

import fleetlight.checkpoint as checkpoint
from fleetlight.errors import FleetError, MissingObjectError, PublicationError
from fleetlight.fleet.checkpoints.model_values import copied
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts.publishing import PublishOptions
from fleetlight.fleet.recording.process_metrics import note
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.server_checkpoint import table_weights
from fleetlight.fleet.training.registering import registered_model
from fleetlight.kernels import table_seed
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.tables.dense_state import DenseState, tensor_of, whole
from fleetlight.ps.transport.interface import ReceivedReply
from fleetlight.publication import manifest as manifests
from fleetlight.publication.lease import LEASE, RENEW_S, Lease
from fleetlight.publication.manifest import (
    MANIFEST,
    DenseFile,
    Publication,
    PublicationManifest,
    PublishedTable,
    RowFile,
)
from fleetlight.publication.row_file import arrow
from fleetlight.store import ObjectStore, store_at

# not `from fleetlight import`, which imports the API and would be a circle


def local_values(job: Job, session: ServerSession) -> dict[str, Tensor]:
    """Copies of the dense values of worker 0, by name; tied ones have their first name alone."""
    state = checkpoint.model_state(registered_model(job))
    tables = {id(weight) for weight in table_weights(session.bound)}
    live = registered_model(job).state_dict(keep_vars=True)
    return {
        name: tensor
        for name, tensor in copied(state).tensors.items()
        if state.kinds[name] != "extra" and id(live[name]) not in tables
    }


def with_served(
    values: Mapping[str, Tensor], session: ServerSession, replies: Mapping[int, ReceivedReply]
) -> dict[str, Tensor]:
    """The values, with those that the servers had at their cuts."""
    plan, placement = session.bound.plan, session.client.placement
    states = [DenseState(replies[server].arrays, [], [], []) for server in sorted(replies)]
    served = whole(plan, placement, states).values
    return dict(values) | {
        plan.dense[number].name: tensor_of(array).view(plan.dense[number].shape).clone()
        for number, array in served.items()
    }


def with_tied(job: Job, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values under all their names: a program has each name of tied values."""
    aliases = checkpoint.model_state(registered_model(job)).aliases
    tied = {name: values[first].clone() for name, first in aliases.items() if first in values}
    return {**values, **tied}


def encoded(values: Mapping[str, Tensor]) -> bytes:
    """The values as safetensors; NumPy has no bfloat16, so they become float32."""
    tensors = {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous()
        for name, tensor in values.items()
    }
    return save(tensors)


_KEPT = (MANIFEST, LEASE)


class PublicationTarget:
    """Writes manifests; a file that no manifest names is deleted after a while."""

    def __init__(
        self, store: ObjectStore, tables: Sequence[PublishedTable], every_s: float
    ) -> None:
        self.store = store
        self._tables, self._every_s = list(tables), every_s
        self._version: str | None = None
        #: the manifest of this publisher
        self.manifest: PublicationManifest | None = None
        #: the number of the last publication at this target
        self.number = 0
        self._epoch = 1
        #: the manifest there is not the one that this publisher replaced last
        self.is_outdated = False
        self._read()
        #: files that no manifest names, and since when
        self._unnamed: dict[str, float] = {}

    def _read(self) -> None:
        """Continue the numbers of an earlier publisher."""
        try:
            found = self.store.get(MANIFEST)
        except MissingObjectError:
            return
        self._version = found.version
        earlier = manifests.decode(bytes(found.data), f"{self.store.url}/{MANIFEST}")
        self.number = max(self.number, earlier.newest.number)
        self._epoch = max(self._epoch, earlier.epoch + 1)

    def begin_epoch(self) -> None:
        """The values are those of a loaded checkpoint: the next publication is a base."""
        self.manifest, self._epoch = None, self._epoch + 1

    def start_over(self) -> None:
        """Continue after the manifest that is there now; the next publication is a base."""
        self.begin_epoch()
        self._version = None
        self._read()
        self.is_outdated = False

    def put_dense(self, prefix: str, data: bytes) -> DenseFile:
        """Write the dense values of a publication."""
        name = f"{prefix}dense.safetensors"
        self.store.put(name, data)
        return DenseFile(name, len(data), hashlib.sha256(data).hexdigest())

    def check_sees(self, files: Sequence[RowFile], dense: DenseFile) -> None:
        """Raise if a file did not arrive whole, or is in a folder that this worker does not see."""
        every: list[RowFile | DenseFile] = [*files, dense]
        for file in every:
            found = self.store.head(file.name)
            if found is None or found.size != file.bytes:
                who = f"server {file.server}" if isinstance(file, RowFile) else "worker 0"
                size = "no such file" if found is None else f"{found.size} bytes"
                raise PublicationError(
                    f"{self.store.url}/{file.name}: {who} wrote {file.bytes} bytes, and worker 0 "
                    f"sees {size}; publish to a bucket, or to a folder that all hosts share"
                )

    def complete(self, publication: Publication) -> PublicationManifest:
        """Name a publication in the manifest; from then on it exists."""
        base = self.manifest
        if base is None or not publication.previous:
            new = PublicationManifest(
                epoch=self._epoch, every_s=self._every_s, tables=self._tables, base=publication
            )
        else:
            new = PublicationManifest(
                epoch=self._epoch,
                every_s=self._every_s,
                tables=self._tables,
                base=base.base,
                deltas=[*base.deltas, publication],
            )
        data = manifests.encode(new)
        if self._version is None:
            version = self.store.create(MANIFEST, data)
        else:
            version = self.store.swap(MANIFEST, data, self._version)
        if version is None:
            self.is_outdated = True
            raise PublicationError(
                f"{self.store.url}/{MANIFEST} is not the one that this job wrote last: another "
                "publisher has replaced it, or a reply was lost; the next publication has all rows"
            )
        self._version, self.manifest, self.number = version, new, publication.number
        return new

    def prune(self, grace_s: float) -> None:
        """Delete files that no manifest has named for so long: readers may still read them."""
        assert self.manifest is not None, "prune() comes after complete()"
        named, now = {*self.manifest.names, *_KEPT}, time.monotonic()
        there = [one.name for one in self.store.list() if one.name not in named and _ours(one.name)]
        self._unnamed = {name: self._unnamed.get(name, now) for name in there}
        old = [name for name, since in self._unnamed.items() if now - since >= grace_s]
        if old:
            self.store.delete(old)
            logger.debug("%s: deleted %d files of earlier publications", self.store.url, len(old))


def prefix_of(number: int, publication: str) -> str:
    """The folder of a publication, for names of its files."""
    return f"{number:08d}-{publication}/"


def _ours(name: str) -> bool:
    """True for names that `prefix_of` begins."""
    folder = name.partition("/")[0]
    return "/" in name and folder[:8].isdigit() and folder[8:9] == "-"


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
