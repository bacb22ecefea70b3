# SPDX-License-Identifier: Apache-2.0
"""`Lease`: one publisher at a target. Its file says who publishes, and changes while it does.

No clock is compared: a second publisher watches whether the file changes. So it refuses to start
after one change, and takes over where there is none for long.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from fleetlight.errors import MissingObjectError, PublicationError
from fleetlight.observe.log import logger
from fleetlight.store import Object, ObjectStore

LEASE = "publisher.json"
#: how often the file changes
RENEW_S = 5.0
#: a publisher that renews no lease for so many intervals has ended
_MISSED = 4
#: how often a second publisher looks, within one interval
_LOOKS = 5


class Holder(msgspec.Struct, frozen=True):
    """The content of the file."""

    #: the name of the job; "" if it has none
    job: str
    #: for messages
    process: str
    #: of this publisher alone
    token: str
    renewed: int
    renew_s: float
    #: the publisher has ended
    is_over: bool = False

    def after(self, *, is_over: bool = False) -> Holder:
        """The next content of the file."""
        return msgspec.structs.replace(self, renewed=self.renewed + 1, is_over=is_over)


class Lease:
    """The right to publish at a target. Several threads may use it."""

    def __init__(self, store: ObjectStore, holder: Holder, version: str) -> None:
        self._store, self._holder, self._version = store, holder, version
        self._replacing = threading.Lock()

    @classmethod
    def acquire(
        cls,
        store: ObjectStore,
        job: str,
        renew_s: float = RENEW_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> Lease:
        """Take the lease; PublicationError while another publisher has it.

        A worker that was restarted takes over the lease of its own job at once.
        """
        process = f"process {os.getpid()} on {socket.gethostname()}"
        holder = Holder(job, process, secrets.token_hex(8), 0, renew_s)
        while True:
            data = msgspec.json.encode(holder)
            found = _read(store)
            if found is None:
                version = store.create(LEASE, data)
            else:
                other = _decoded(found, store)
                is_own = bool(job) and other.job == job
                if not other.is_over and not is_own:
                    found = _once_silent(store, found, other, pause)
                version = store.swap(LEASE, data, found.version)
            if version is not None:
                return cls(store, holder, version)

    def renew(self) -> None:
        """Show that the publisher works; PublicationError if another one has taken over."""
        self._replace(self._holder.after())

    def release(self) -> None:
        """Let the next publisher start at once."""
        self._replace(self._holder.after(is_over=True))

    def _replace(self, holder: Holder) -> None:
        with self._replacing:
            data = msgspec.json.encode(holder)
            version = self._store.swap(LEASE, data, self._version)
            if version is None:
                version = self._swapped_again(data, holder)
            self._holder, self._version = holder, version

    def _swapped_again(self, data: bytes, holder: Holder) -> str:
        """Replace what an earlier call wrote that failed, because the reply was lost."""
        found = _read(self._store)
        now = None if found is None else _decoded(found, self._store)
        if found is not None and now is not None and now.token == holder.token:
            version = self._store.swap(LEASE, data, found.version)
            if version is not None:
                return version
        who = "no process" if now is None else now.process
        raise PublicationError(
            f"{self._store.url}: {who} publishes here now, in place of this job, which renewed "
            f"no lease for {_MISSED * holder.renew_s:g} s; give each job a target of its own"
        )


def _read(store: ObjectStore) -> Object | None:
    try:
        return store.get(LEASE)
    except MissingObjectError:
        return None


def _decoded(found: Object, store: ObjectStore) -> Holder:
    try:
        return msgspec.json.decode(found.data, type=Holder)
    except msgspec.DecodeError as error:
        raise PublicationError(
            f"{store.url}/{LEASE} is not the lease of a publisher: {error}; choose another target, "
            "or remove the file"
        ) from error


def _once_silent(
    store: ObjectStore, found: Object, other: Holder, pause: Callable[[float], None]
) -> Object:
    """The file, once the holder is silent for long; PublicationError when it renews its lease."""
    logger.info(
        "%s: waiting up to %g s to see whether %s still publishes here",
        store.url,
        _MISSED * other.renew_s,
        other.process,
    )
    for _ in range(_MISSED * _LOOKS):
        pause(other.renew_s / _LOOKS)
        found = _read(store) or found
        now = _decoded(found, store)
        if now.is_over:
            break
        if (now.token, now.renewed) != (other.token, other.renewed):
            raise PublicationError(
                f"{store.url}: {now.process} publishes here already; give each job a target of its "
                "own, or end the other job first"
            )
    return found
