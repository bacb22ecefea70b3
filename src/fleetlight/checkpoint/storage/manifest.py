# SPDX-License-Identifier: Apache-2.0
"""`manifest.json`: the typed record of a checkpoint, and its exact bytes.

The manifest is the checkpoint: data files count only when the manifest names them.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleetlight.errors import CheckpointError, CorruptCheckpointError

#: the format of training checkpoints
FORMAT = "fleetlight-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
#: `part` of a table's file
DELTA, REMOVED = "delta", "removed"

# Stands where the checksum goes while the checksum is computed.
_BLANK = "0" * 64


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a generation, as it was when it was written."""

    name: str
    bytes: int
    sha256: str


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor, what it is, and the file that holds it."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    file: str


class GroupEntry(msgspec.Struct, frozen=True):
    """A param group: names of its parameters, and its packed hyper-parameters."""

    params: list[str]
    options: dict[str, Any]


class OptimizerEntry(msgspec.Struct, frozen=True, rename={"class_name": "class"}):
    """An optimizer without its tensors: everything is found by parameter name."""

    class_name: str
    shapes: dict[str, tuple[int, ...]]
    param_groups: list[GroupEntry]
    state: dict[str, dict[str, Any]]


class TableFileEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a table from one server."""

    name: str
    server: int
    rows: int
    #: the first bucket with rows in it, and the one after the last; None: all of the server
    buckets: tuple[int, int] | None = None
    #: `DELTA`: rows that replace those of the base; `REMOVED`: ids without a row; "": all rows
    part: str = ""


class TableEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the parameter servers."""

    name: str
    dim: int
    rows: int
    #: the rule that updates its rows, and the fixed options of the rule
    rule: str
    options: dict[str, float]
    #: kind and two numbers: the first values of a row
    initializer: tuple[str, float, float]
    #: kind and number: the admission rule
    entry: tuple[str, float] | None
    #: above 0: a layer of torch that was moved onto the table; its ids are 0..ids-1
    ids: int
    #: the parameters of the model that stand for it, which have no elements
    weights: list[str]
    files: list[TableFileEntry]


class HighWaterEntry(msgspec.Struct, frozen=True):
    """The last push of a worker that a server had applied."""

    worker: int
    started_at: int
    server: int
    sequence: int


class BaseEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The generation whose rows a delta completes."""

    generation: int
    folder: str
    #: the name by which servers know what changed since
    name: str
    #: the files of its tables
    files: list[FileEntry] = []


class EarlierEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A generation before the current one that was kept."""

    generation: int
    folder: str
    #: the folder of its base, if it is a delta
    base: str = ""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields every manifest starts with; enough to know who can read the rest."""

    format: str
    version: int
    checksum: str
    generation: int


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of any manifest that say which folders stay, and what a delta may complete."""

    generation: int
    name: str = ""
    base: BaseEntry | None = None

    @property
    def generations(self) -> set[int]:
        """The generations whose files it needs."""
        return {self.generation} if self.base is None else {self.generation, self.base.generation}


def same_base(current: Named, base: BaseEntry) -> bool:
    """Whether a base is the current generation, or that of the current one."""
    there = current if current.base is None else current.base
    return (there.generation, there.name) == (base.generation, base.name)


class BaseManifest(Head, frozen=True, kw_only=True):
    """The fields of every manifest: who wrote the generation, when, and its files."""

    created: datetime
    fleetlight: str
    torch: str
    files: list[FileEntry]
    #: the folder of the generation, where its number does not tell it
    folder: str | msgspec.UnsetType = msgspec.UNSET
    #: generations that are still there, the newest first
    earlier: list[EarlierEntry] | msgspec.UnsetType = msgspec.UNSET
    #: the base of a delta, if its files are in another folder
    base: BaseEntry | msgspec.UnsetType = msgspec.UNSET
    #: the name by which servers know what changed since this generation, which may be a base
    name: str | msgspec.UnsetType = msgspec.UNSET


class Manifest(BaseManifest, frozen=True, kw_only=True):
    """The manifest of a training checkpoint."""

    workers: int
    servers: int
    seed: int
    epoch: int
    step: int
    tensors: list[TensorEntry]
    aliases: dict[str, str]
    model_extra: dict[str, Any]
    optimizers: list[OptimizerEntry]
    tables: list[TableEntry] = []
    high_water: list[HighWaterEntry] = []
    extra: dict[str, Any] = {}


AnyHead = TypeVar("AnyHead", bound=Head)
AnyManifest = TypeVar("AnyManifest", bound=BaseManifest)


def folder_of(manifest: BaseManifest) -> str:
    """The name of the folder of a manifest's generation."""
    if isinstance(manifest.folder, str):
        return manifest.folder
    return f"generation-{manifest.generation:06d}"


def base_folder(manifest: BaseManifest) -> str:
    """The name of the folder of a delta's base; "" for other generations."""
    return manifest.base.folder if isinstance(manifest.base, BaseEntry) else ""


def all_files(manifest: BaseManifest) -> dict[str, FileEntry]:
    """By name: the files of a generation, and those of its base."""
    base = manifest.base.files if isinstance(manifest.base, BaseEntry) else []
    return {entry.name: entry for entry in (*base, *manifest.files)}


def folder_with(manifest: BaseManifest, name: str) -> str:
    """The name of the folder with a file of a generation, its own or that of its base."""
    if isinstance(manifest.base, BaseEntry) and any(f.name == name for f in manifest.base.files):
        return manifest.base.folder
    return folder_of(manifest)


def encode(manifest: BaseManifest) -> bytes:
    """The bytes of a manifest, sealed with a checksum over themselves."""
    blank = msgspec.structs.replace(manifest, checksum=_BLANK)
    body = msgspec.json.format(msgspec.json.encode(blank), indent=1) + b"\n"
    return body.replace(_BLANK.encode(), hashlib.sha256(body).hexdigest().encode(), 1)


def decode(data: bytes, kind: type[AnyManifest], format_name: str, path: Path | str) -> AnyManifest:
    """Parse and check a manifest; the head first, as the rest differs in other versions."""
    head = _parse(data, Head, path)
    if head.format != format_name:
        raise CheckpointError(
            f"{path}: got format {head.format!r}, expected {format_name!r}; "
            f"this directory holds something else"
        )
    if head.version != VERSION:
        raise CheckpointError(
            f"{path} has format version {head.version}, expected {VERSION}; use the Fleetlight "
            "that wrote it"
        )
    _check_seal(data, head.checksum, path)
    return _parse(data, kind, path)


def _parse(data: bytes, kind: type[AnyHead], path: Path | str) -> AnyHead:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path} is damaged ({len(data)} bytes): {error}; load another checkpoint"
        ) from error


def _check_seal(data: bytes, checksum: str, path: Path | str) -> None:
    body = data.replace(checksum.encode(), _BLANK.encode(), 1)
    got = hashlib.sha256(body).hexdigest()
    if got != checksum:
        raise CorruptCheckpointError(
            f"{path} was changed after it was written: got sha256 {got}, expected {checksum}; "
            f"load another checkpoint"
        )
