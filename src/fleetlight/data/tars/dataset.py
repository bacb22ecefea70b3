# SPDX-License-Identifier: Apache-2.0
"""`TarFiles`: a data set over tar files of samples."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fleetlight.data.locations.files import in_threads
from fleetlight.data.locations.paths import Paths, sources_of
from fleetlight.data.readers.images.image_files import check_pillow, pixels_of
from fleetlight.data.sources.loaded_groups import LoadedGroups
from fleetlight.data.sources.windows import Grouped
from fleetlight.data.tars.members import members
from fleetlight.data.tars.shard import TarShard, key_of
from fleetlight.errors import ConfigError, DataError
from fleetlight.kernels.arrays import Ids
from fleetlight.store import ObjectStore, store_at

#: extensions, or by the name in the sample: an extension, or several with `;` between
Fields = Sequence[str] | Mapping[str, str] | None
#: by extension: a function of the bytes of a member
Decoders = Mapping[str, Callable[[bytes], Any]]
#: in place of an extension: the key of the sample
KEY = "__key__"

_IMAGES = ("jpg", "jpeg", "png")


def _image(data: bytes) -> Tensor:
    pixels = pixels_of(io.BytesIO(data))
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _array(data: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


_DECODERS: Decoders = {
    "json": json.loads,
    "cls": int,
    "txt": bytes.decode,
    "npy": _array,
    **dict.fromkeys(_IMAGES, _image),
}


class SampleDecoder:
    """Decodes the fields that the user wants, by the extensions of their members."""

    def __init__(self, fields: Mapping[str, str], decoders: Decoders) -> None:
        self._fields = {name: one.lower().split(";") for name, one in fields.items()}
        self._decoders = {**_DECODERS, **decoders}
        wanted = {one for some in self._fields.values() for one in some}
        if any(self._decoder(one) is _image for one in wanted):
            check_pillow()

    def decode(self, data: memoryview, start: int, shard: TarShard) -> dict[str, Any]:
        """The fields of a sample, whose bytes begin at `start`."""
        key, found = extensions_of(data, start, shard)
        return {name: self._field(name, key, found, shard) for name in self._fields}

    def _field(self, name: str, key: str, found: Mapping[str, _Content], shard: TarShard) -> Any:
        for extension in self._fields[name]:
            if extension == KEY:
                return key
            if extension in found:
                return self._decoded(found[extension], extension, key, shard)
        wanted = " or ".join(f".{one}" for one in self._fields[name])
        raise DataError(
            f"{shard.file.name}, key {key!r}: got no member {wanted} for the field {name!r}, only "
            f"{', '.join(f'.{one}' for one in found)}; leave the field out, or the sample when you "
            "write the file"
        )

    def _decoded(self, content: _Content, extension: str, key: str, shard: TarShard) -> Any:
        try:
            return self._decoder(extension)(bytes(content.data))
        except Exception as error:
            why = str(error) or type(error).__name__
            raise DataError(
                f"{shard.file.name}, member {content.member!r}, key {key!r}: {len(content.data)} "
                f"bytes cannot be decoded as .{extension} ({why}); write the member again, or give "
                f"a function of your own: decode={{{extension!r}: ...}}"
            ) from error

    def _decoder(self, extension: str) -> Callable[[bytes], Any]:
        """That of the whole extension, or of its last part: `png` for `seg.png`."""
        last = extension.rpartition(".")[2]
        return self._decoders.get(extension) or self._decoders.get(last) or bytes


@dataclasses.dataclass(frozen=True)
class _Content:
    """A member of a sample."""

    member: str
    data: memoryview


def extensions_of(data: memoryview, start: int, shard: TarShard) -> tuple[str, dict[str, _Content]]:
    """The key of a sample, and its members by extension."""
    found: dict[str, _Content] = {}
    name, own = shard.file.name, ""
    for member in members(_reader(data, start), start, start + len(data), name, is_whole=False):
        split = key_of(member.name)
        if split is None:
            continue
        key, extension = split
        own = own or key
        if key != own:
            raise DataError(f"{name}: got the key {key!r} beside {own!r}; the file has changed")
        if extension in found:
            raise DataError(
                f"{name}, member {member.name!r}: the key {key!r} has two members .{extension}; "
                "give each sample a key of its own"
            )
        content = data[member.start - start : member.stop - start]
        found[extension] = _Content(member.name, content)
    return own, found


def _reader(data: memoryview, start: int) -> Callable[[int, int], bytes]:
    return lambda at, size: bytes(data[at - start : at - start + size])


def fields_of(fields: Fields, first: Callable[[], Sequence[str]]) -> dict[str, str]:
    """Extensions by name; `first`: of the members of the first sample, which are the default."""
    if isinstance(fields, str):
        raise ConfigError(
            f"webdataset: got fields={fields!r}, expected a list such as ['jpg', 'cls'], or a dict "
            "such as {'image': 'jpg;png', 'label': 'cls'}"
        )
    if fields is None:
        fields = first()
    found = dict(fields) if isinstance(fields, Mapping) else {one: one for one in fields}
    if not found:
        raise ConfigError("webdataset: got no fields, expected at least one extension")
    return found


#: tars that are indexed at once
_INDEXING = 8
#: groups that are loaded at once, and files of which samples are
_LOADING = 4


class SampleGroup(NamedTuple):
    """Samples of a shard that are read together."""

    shard: TarShard
    first: int
    last: int


class TarFiles(Grouped):
    """Samples of tar files: members that follow each other and share a key.

    A sample is a dict of its decoded members, or what `transform` makes of it. `loader` reads the
    files in stretches, which it shuffles; other loaders read each sample on its own.

    Args:
        shards: the tar files; `webdataset` opens them.
        fields: the members that a sample has, as in `webdataset`.
        decode: functions of bytes, by extension.
        transform: called with each sample.

    Raises:
        DataError: the files have no sample.

    Example:
        >>> import io, tarfile
        >>> with tarfile.open("images.tar", "w") as tar:
        ...     member = tarfile.TarInfo("0001.cls")
        ...     member.size = 1
        ...     tar.addfile(member, io.BytesIO(b"7"))
        >>> fleet.data.webdataset("images.tar")
        <images.tar: 1 samples>
    """

    WINDOW: ClassVar[int] = 1_024

    def __init__(
        self,
        shards: Sequence[TarShard],
        fields: Fields,
        decode: Decoders | None,
        transform: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        self._shards, self._transform = [one for one in shards if one.samples], transform
        if not self._shards:
            raise DataError(f"{shards[0].file.name}: got no sample in {len(shards)} files")
        self._groups = [
            SampleGroup(shard, *group) for shard in self._shards for group in shard.groups()
        ]
        self._rows = [last - first for _, first, last in self._groups]
        self._firsts = [0, *itertools.accumulate(self._rows)]
        self._decoder = SampleDecoder(fields_of(fields, self._first_extensions), decode or {})
        self._loaded = LoadedGroups(self._load, _LOADING)

    # -- the data set

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self!r}: got sample {index}, expected one of {len(self)}")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int] | Ids) -> list[Any]:
        """The samples of a batch, as DataLoader requests them."""
        numbers = [int(index) for index in indices]
        groups = [bisect.bisect_right(self._firsts, one) - 1 for one in numbers]
        self._loaded.start_batch(groups)
        alone = {
            one: group
            for one, group in zip(numbers, groups, strict=True)
            if not self._loaded.has_announced(group)
        }
        read = self._read_alone(alone)
        return [
            self._sample(one, group, read.get(one))
            for one, group in zip(numbers, groups, strict=True)
        ]

    @staticmethod
    def collate(rows: Any) -> Any:
        """A batch, as torch makes it."""
        return default_collate(rows)

    def __repr__(self) -> str:
        more = len(self._shards) - 1
        files = self._shards[0].file.name + (f" and {more} more" if more else "")
        return f"<{files}: {len(self)} samples>"

    # -- for loaders that read windows

    @property
    def group_rows(self) -> Sequence[int]:
        return self._rows

    @property
    def fingerprint(self) -> str:
        """Changes with the files, and not with the folder that they are in."""
        facts = [
            (one.file.name.rsplit("/", 1)[-1], one.file.size, one.samples) for one in self._shards
        ]
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
        return f"{len(self._shards)} files, {len(self)} samples, {digest}"

    def will_read(self, groups: Sequence[int]) -> None:
        self._loaded.will_read(groups)

    # --

    def _load(self, group: int) -> memoryview:
        """The bytes of a group."""
        shard, first, last = self._groups[group]
        [data] = _read(shard, [(first, last)])
        return data

    def _sample(self, number: int, group: int, data: memoryview | None) -> Any:
        shard, first, _ = self._groups[group]
        place = first + number - self._firsts[group]
        start, stop = (int(one) for one in shard.starts[place : place + 2])
        if data is None:
            before = int(shard.starts[first])
            data = self._loaded.get(group)[start - before : stop - before]
        fields = self._decoder.decode(data, start, shard)
        return fields if self._transform is None else self._transform(fields)

    def _read_alone(self, groups: dict[int, int]) -> dict[int, memoryview]:
        """The bytes of samples of which the groups are given, by number."""
        by_shard: dict[int, tuple[TarShard, list[tuple[int, int]]]] = {}
        for number, group in groups.items():
            shard, first, _ = self._groups[group]
            _, own = by_shard.setdefault(id(shard), (shard, []))
            own.append((number, first + number - self._firsts[group]))
        found: dict[int, memoryview] = {}
        for (_, own), data in zip(
            by_shard.values(),
            in_threads(_read_samples, list(by_shard.values()), _LOADING),
            strict=True,
        ):
            found.update(zip((number for number, _ in own), data, strict=True))
        return found

    def _first_extensions(self) -> list[str]:
        shard = self._shards[0]
        [data] = _read(shard, [(0, 1)])
        return list(extensions_of(data, int(shard.starts[0]), shard)[1])


def webdataset(
    files: Paths,
    fields: Fields = None,
    *,
    decode: Decoders | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
    index: str | os.PathLike[str] | None = None,
) -> TarFiles:
    """Samples of tar files.

    Args:
        files: names, numbers in braces, patterns, folders, or a list of them, on this machine or
            in a bucket.
        fields: the extensions to read, or {name in the sample: extension, or several such as
            "jpg;png"}; by default the members of the first sample.
        decode: functions of bytes, by extension.
        transform: called with each sample.
        index: a folder or a URL that keeps where samples begin; without it each job reads the
            headers of all files once.

    Returns:
        A data set; its `loader(batch_size)` makes batches.

    Raises:
        DataError: a file does not exist, cannot be read, or has no sample.

    Example:
        >>> import io, tarfile
        >>> with tarfile.open("images.tar", "w") as tar:
        ...     member = tarfile.TarInfo("0001.cls")
        ...     member.size = 1
        ...     tar.addfile(member, io.BytesIO(b"7"))
        >>> fleet.data.webdataset("images.tar", {"label": "cls"})[0]
        {'label': 7}
    """
    found = sources_of(files, (".tar",))
    kept: ObjectStore | None = None if index is None else store_at(index)
    shards = in_threads(lambda file: TarShard.at(file, kept), found, _INDEXING)
    return TarFiles(shards, fields, decode, transform)


def _read(shard: TarShard, samples: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The bytes of some ranges of samples."""
    spans = [(int(shard.starts[first]), int(shard.starts[last])) for first, last in samples]
    shard.file.check_unchanged()
    return shard.file.read(spans)


def _read_samples(samples: tuple[TarShard, list[tuple[int, int]]]) -> list[memoryview]:
    shard, own = samples
    return _read(shard, [(place, place + 1) for _, place in own])
