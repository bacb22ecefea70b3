# SPDX-License-Identifier: Apache-2.0
"""`PublicationTarget`: the manifest of a target, and the files that it names."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from fleetlight.errors import MissingObjectError, PublicationError
from fleetlight.observe.log import logger
from fleetlight.publication import manifest as manifests
from fleetlight.publication.lease import LEASE
from fleetlight.publication.manifest import (
    MANIFEST,
    DenseFile,
    Publication,
    PublicationManifest,
    PublishedTable,
    RowFile,
)
from fleetlight.store import ObjectStore

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
