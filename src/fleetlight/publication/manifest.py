# SPDX-License-Identifier: Apache-2.0
"""`current.json`: which publications a reader needs, and in which order. Pure data.

A base has all rows; each delta has the rows that changed since the publication before it. A
publication exists once the manifest names it: its files are complete by then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from fleetlight.errors import PublicationError

MANIFEST = "current.json"
FORMAT, VERSION = "fleetlight-publication", 1
#: the forms of rows in files
FORMS = F32, F16, INT8 = "f32", "f16", "int8"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")


class PublishedTable(msgspec.Struct, frozen=True):
    """A table, and how to compute the row of an id that it does not have."""

    name: str
    dim: int
    #: the form of its rows in files
    form: str
    seed: int
    #: kind, a, b: see `kernels.Initializer`
    initializer: tuple[str, float, float]
    #: the type of the weights in training: fp32 or bf16
    dtype: str = "fp32"


class DenseFile(msgspec.Struct, frozen=True):
    """The file of dense values, in the safetensors format."""

    name: str
    bytes: int
    sha256: str


class RowFile(msgspec.Struct, frozen=True):
    """The file of one table that one server has written."""

    table: str
    server: int
    name: str
    bytes: int
    sha256: str
    rows: int
    #: how many ids it removes
    removed: int


class Publication(msgspec.Struct, frozen=True):
    """A base or a delta."""

    #: unique, even among publications that were never completed
    id: str
    #: counts all publications of the target
    number: int
    #: the id of the publication that a delta follows; "" for a base
    previous: str
    #: the step of worker 0
    step: int
    #: seconds since 1970 by the clock of worker 0, when the servers cut their rows
    time: float
    dense: DenseFile
    files: list[RowFile]

    @property
    def bytes(self) -> int:
        """The bytes of all row files."""
        return sum(file.bytes for file in self.files)

    def files_of(self, table: str) -> list[RowFile]:
        """The files of one table."""
        return [file for file in self.files if file.table == table]


class PublicationManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The newest publication, and what it is based on."""

    format: str = FORMAT
    version: int = VERSION
    #: counts starts of publishers and loaded checkpoints: rows of an older epoch never follow
    epoch: int
    #: how often the publisher publishes
    every_s: float
    tables: list[PublishedTable]
    base: Publication
    deltas: list[Publication] = []

    @property
    def chain(self) -> list[Publication]:
        """The base, then the deltas in order."""
        return [self.base, *self.deltas]

    @property
    def newest(self) -> Publication:
        """The last of the chain."""
        return self.chain[-1]

    @property
    def names(self) -> Iterator[str]:
        """The names of all files."""
        for one in self.chain:
            yield one.dense.name
            yield from (file.name for file in one.files)


def encode(manifest: PublicationManifest) -> bytes:
    """The manifest as JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode(data: bytes, where: str) -> PublicationManifest:
    """Inverse of `encode`; raises if the manifest is damaged or breaks a rule of the format."""
    try:
        manifest = msgspec.json.decode(data, type=PublicationManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PublicationError(
            f"{where} is damaged ({len(data)} bytes): {error}; let the job publish again"
        ) from error
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise PublicationError(
            f"{where} has the format {manifest.format!r}, version {manifest.version}, expected "
            f"{FORMAT!r}, version {VERSION}; use the Fleetlight that published it"
        )
    _check(manifest, where)
    return manifest


def _check(manifest: PublicationManifest, where: str) -> None:
    """Refuse gaps, duplicates and names outside the target."""
    if manifest.base.previous:
        raise PublicationError(
            f"{where}: the base {manifest.base.number} follows {manifest.base.previous!r}, "
            "expected a publication with all rows; let the job publish again"
        )
    for before, delta in zip(manifest.chain, manifest.deltas, strict=False):
        _check_follows(before, delta, where)
    expected = _parts(manifest.base)
    for one in manifest.chain:
        _check_files(one, expected, where)
    for name in manifest.names:
        if not _NAME.fullmatch(name) or ".." in name.split("/"):
            raise PublicationError(f"{where} names {name!r}, expected a file below the target")


def _check_follows(before: Publication, delta: Publication, where: str) -> None:
    if delta.number <= before.number:
        raise PublicationError(
            f"{where}: delta {delta.number} comes after publication {before.number}, expected "
            f"{before.number + 1}: it is there twice or out of order; let the job publish again"
        )
    if delta.number != before.number + 1 or delta.previous != before.id:
        raise PublicationError(
            f"{where}: delta {delta.number} follows {delta.previous!r}, but publication "
            f"{before.number} before it is {before.id!r}: a delta is missing; let the job publish "
            "again"
        )


def _check_files(one: Publication, expected: Sequence[tuple[str, int]], where: str) -> None:
    if (parts := _parts(one)) != expected:
        raise PublicationError(
            f"{where}: publication {one.number} has the files of (table, server) {parts}, expected "
            f"{list(expected)}, those of the base; let the job publish again"
        )


def _parts(one: Publication) -> list[tuple[str, int]]:
    return sorted((file.table, file.server) for file in one.files)


def check_newer(new: PublicationManifest, old: PublicationManifest, where: str) -> None:
    """Refuse a manifest that is older than one that was read before, or contradicts it."""
    if (new.epoch, new.newest.number) < (old.epoch, old.newest.number):
        raise PublicationError(
            f"{where} has publication {new.newest.number} of epoch {new.epoch}, but publication "
            f"{old.newest.number} of epoch {old.epoch} was read before: it is stale; end the older "
            "publisher, or start a new reader to go back"
        )
    same_number = new.newest.number == old.newest.number
    pairs = [(old.newest, new.newest)] if same_number else []
    if new.base.id == old.base.id:
        pairs += zip(old.chain, new.chain, strict=False)
    for before, now in pairs:
        if before.id != now.id:
            raise PublicationError(
                f"{where}: publication {now.number} was {before.id!r} before, and is {now.id!r} "
                "now; let the job publish again"
            )
