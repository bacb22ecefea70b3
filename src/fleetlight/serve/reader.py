# SPDX-License-Identifier: Apache-2.0
"""`Reader`: follows the publications of a job, and looks up their newest rows."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetlight.errors import ConfigError, MissingObjectError, PublicationError
from fleetlight.observe.log import logger
from fleetlight.publication.manifest import MANIFEST, PublicationManifest, check_newer, decode
from fleetlight.publication.row_file import arrow
from fleetlight.serve.cache import LayerCache
from fleetlight.serve.view import ModelView
from fleetlight.store import Location, absolute, store_at

#: how often a reader that waits for the first publication looks
_WAIT_POLL_S = 0.2


def _check(name: str, seconds: object, *, above: bool = False) -> None:
    good = isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds >= 0
    if not good or (above and not seconds):
        least = "above 0" if above else "of 0 or more"
        raise ConfigError(f"Reader: got {name}={seconds!r}, expected a number of seconds {least}")


class Reader:
    """Looks up rows of the newest publication. All methods may be called by several threads.

    A thread looks for new publications. Rows change all at once, between two lookups; use `view`
    for several lookups of the same model. A publication that cannot be read is logged, `error` has
    the reason, and lookups continue with the one before it. Use it as a context manager, or call
    `close`.

    Args:
        url: the folder or URL of `fleet.publish`.
        period_s: seconds between two looks for a new publication.
        wait_s: seconds to wait for the first publication.
        cache: a folder for the rows, which all processes on this machine map; by default one in the
            system's folder for temporary files.
        follow: False looks for publications in `refresh` only.

    Raises:
        PublicationError: there is no publication, or it cannot be read.

    Example:
        >>> from fleetlight.serve import Reader
        >>> fleet.init()
        >>> model = fleet.distributed_model(fleet.nn.SparseEmbedding(2, table="emb"))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = fleet.distributed_optimizer(optimizer)
        >>> fleet.init_worker()
        >>> _ = fleet.publish("published").publish_now()
        >>> with Reader("published", cache="cache") as reader:
        ...     reader.lookup("emb", [7, 9]).shape
        (2, 2)
    """

    def __init__(
        self,
        url: Location,
        *,
        period_s: float = 0.5,
        wait_s: float = 60.0,
        cache: str | os.PathLike[str] | None = None,
        follow: bool = True,
    ) -> None:
        """Read the newest publication; wait for the first one for up to `wait_s` seconds.

        Look for new ones each `period_s` seconds, or without `follow` only in `refresh`. `cache`
        is a folder for the rows, which all processes on this machine map; without it they share
        one in the system's folder for temporary files.
        """
        arrow()
        _check("period_s", period_s, above=True)
        _check("wait_s", wait_s)
        self._store = store_at(absolute(url))
        self._cache = LayerCache(self._store, None if cache is None else Path(cache))
        self._where = f"{self._store.url}/{MANIFEST}"
        self._refreshing = threading.Lock()
        self._version = ""
        self._manifest: PublicationManifest | None = None
        #: why the newest publication could not be read; None if it was
        self.error: Exception | None = None
        self._view = self._first(wait_s)
        self._period_s = period_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if follow:
            self._thread = threading.Thread(target=self._follow, name="fleet-reader", daemon=True)
            self._thread.start()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def view(self) -> ModelView:
        """The newest publication that was read; it does not change."""
        return self._view

    def lookup(
        self, table: str, ids: ArrayLike, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """The rows of ids of any shape; an id without a row gets its first value."""
        return self._view.lookup(table, ids, out)

    @property
    def dense(self) -> dict[str, NDArray[Any]]:
        """The dense values by name."""
        return self._view.dense

    @property
    def age_s(self) -> float:
        """Seconds since the servers cut the rows, by the clocks of worker 0 and of this machine."""
        return max(0.0, time.time() - self._view.time)

    @property
    def number(self) -> int:
        """The number of the publication."""
        return self._view.number

    @property
    def epoch(self) -> int:
        """Counts starts of publishers and loaded checkpoints."""
        return self._view.epoch

    @property
    def step(self) -> int:
        """The step of worker 0 at the publication."""
        return self._view.step

    def refresh(self) -> bool:
        """Read the newest publication now; True if there is a new one. Raises what is wrong."""
        with self._refreshing:
            try:
                changed = self._refresh()
            except Exception as error:
                self.error = error
                raise
            self.error = None
            return changed

    def close(self) -> None:
        """Follow no more; lookups still work."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _first(self, wait_s: float) -> ModelView:
        until, has_said = time.monotonic() + wait_s, False
        while True:
            found = self._newer()
            if found is not None:
                return self._read(*found)
            if not has_said:
                # the reply to `head` does not say whether the bucket exists
                with contextlib.suppress(MissingObjectError):
                    self._store.get(MANIFEST)
            if time.monotonic() >= until:
                raise PublicationError(
                    f"{self._where}: no publication after {wait_s:g} s; check the URL, and that a "
                    "job with fleet.publish runs, or wait longer with wait_s="
                )
            if not has_said:
                logger.info("%s: waiting up to %g s for the first publication", self._where, wait_s)
                has_said = True
            time.sleep(min(_WAIT_POLL_S, max(0.0, until - time.monotonic())))

    def _follow(self) -> None:
        said = ""
        while not self._over.wait(self._period_s):
            try:
                self.refresh()
                said = ""
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning(
                        "publication %d stays in use, because a newer one cannot be read: %s",
                        self.number,
                        error,
                    )

    def _refresh(self) -> bool:
        found = self._newer()
        if found is None:
            return False
        self._view = self._read(*found)
        return True

    def _newer(self) -> tuple[PublicationManifest, str] | None:
        """The manifest and its version, if it was replaced since the last read."""
        entry = self._store.head(MANIFEST)
        if entry is None or entry.version == self._version:
            return None
        try:
            found = self._store.get(MANIFEST)
        except MissingObjectError:
            return None
        manifest = decode(bytes(found.data), self._where)
        if self._manifest is not None:
            check_newer(manifest, self._manifest, self._where)
        return manifest, found.version

    def _read(self, manifest: PublicationManifest, version: str) -> ModelView:
        """The view of a manifest; of a newer one, where this one's files are deleted already."""
        while True:
            try:
                view = self._cache.view(manifest)
            except MissingObjectError as error:
                found = self._newer_than(manifest)
                if found is None:
                    raise PublicationError(
                        f"{self._where} names a file that is gone, and there is no newer "
                        f"publication: {error}; let the job publish again"
                    ) from error
                manifest, version = found
                continue
            self._manifest, self._version = manifest, version
            return view

    def _newer_than(self, manifest: PublicationManifest) -> tuple[PublicationManifest, str] | None:
        found = self._newer()
        is_new = found is not None and found[0].newest.id != manifest.newest.id
        return found if is_new else None
