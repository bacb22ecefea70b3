# SPDX-License-Identifier: Apache-2.0
"""`SampleDecoder`: from the bytes of a sample to its fields."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetlight.data.readers.images.image_files import check_pillow, pixels_of
from fleetlight.data.tars.members import members
from fleetlight.data.tars.shard import TarShard, key_of
from fleetlight.errors import ConfigError, DataError

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
