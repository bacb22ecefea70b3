# SPDX-License-Identifier: Apache-2.0
"""`members`: the files in a tar, or in a part of one. Pure.

A member is a header of 512 bytes and its content, filled up to whole blocks. Headers that extend
the next one (long names, pax records) belong to that member.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fleetlight.data.locations.files import check_plain
from fleetlight.errors import DataError

BLOCK = 512
#: so many bytes at a place; fewer where the tar ends
Read = Callable[[int, int], bytes]

_ZEROS = bytes(BLOCK)
_FILES = (b"0", b"\0", b"7")
_LONG_NAME, _PAX, _LONG_LINK, _PAX_FOR_ALL = b"L", b"x", b"K", b"g"
#: links, devices and folders have no content, whatever their size
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")
_MAX_EXTENSION_BYTES = 1 << 20


class TarMember(NamedTuple):
    """A file in a tar, and where it is."""

    name: str
    #: of the first header that belongs to it
    header: int
    #: of the content
    start: int
    stop: int

    @property
    def end(self) -> int:
        """Where the next header is."""
        return _filled_up(self.stop)


def members(
    read: Read, start: int, stop: int, where: str, *, is_whole: bool
) -> Iterator[TarMember]:
    """The files in the bytes from `start` to `stop`; `is_whole`: these must have the tar's end."""
    at = first = start
    given = _Given()
    while at < stop:
        block = read(at, BLOCK)
        if not at:
            check_plain(block, where)
        if len(block) < BLOCK:
            raise DataError(_cut_off(where, stop, f"the header at byte {at}"))
        if block == _ZEROS:
            return
        kind, name, size = _header(block, at, where)
        content = at + BLOCK
        name = given.name or name
        if kind in _EMPTY:
            size = 0
        elif given.size is not None:
            size = given.size
        if content + size > stop:
            raise DataError(_cut_off(where, stop, f"{name!r} at byte {at}, which has {size} bytes"))
        at = _filled_up(content + size)
        if kind in (_LONG_NAME, _PAX, _LONG_LINK, _PAX_FOR_ALL):
            if size > _MAX_EXTENSION_BYTES:
                raise DataError(f"{where}: got a name of {size} bytes at byte {content}")
            given.add(kind, read(content, size), f"{where}, byte {content}")
            continue
        if kind in _FILES:
            yield TarMember(name, first, content, content + size)
        first, given = at, _Given()
    if is_whole:
        raise DataError(_cut_off(where, stop, "the blocks of zeros at its end"))


@dataclasses.dataclass
class _Given:
    """What headers say about the next one."""

    name: str = ""
    size: int | None = None

    def add(self, kind: bytes, content: bytes, where: str) -> None:
        if kind == _LONG_NAME:
            self.name = _text(content)
        elif kind == _PAX:
            records = _pax(content, where)
            self.name = records.get("path", self.name)
            self.size = int(records["size"]) if records.get("size", "").isdecimal() else self.size


def _header(block: bytes, at: int, where: str) -> tuple[bytes, str, int]:
    """The kind, the name and the size of a member."""
    # the checksum itself counts as spaces
    unsigned = sum(block) - sum(block[148:156]) + 8 * 32
    if _octal(block[148:156]) not in (unsigned, _signed_sum(block)):
        raise DataError(f"{where}: got {block[:8]!r} at byte {at}, expected a header of a tar")
    size = _size(block[124:136])
    if size < 0:
        raise DataError(f"{where}: got {block[:8]!r} at byte {at}, expected a header of a tar")
    name = _text(block[:100])
    # GNU's headers have times here
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_text(block[345:500])}/{name}"
    return block[156:157], name, size


def _signed_sum(block: bytes) -> int:
    """The checksum of some old programs."""
    if max(block) < 128:
        return -1
    return sum(byte - 256 * (byte > 127) for byte in block[:148] + block[156:]) + 8 * 32


def _size(field: bytes) -> int:
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    return _octal(field)


def _octal(field: bytes) -> int:
    """A number; -1 for what is none."""
    digits = field.partition(b"\0")[0].strip()
    try:
        return int(digits or b"0", 8)
    except ValueError:
        return -1


def _pax(content: bytes, where: str) -> dict[str, str]:
    """Records such as `20 path=name`, where 20 is the length of the record."""
    found = {}
    while content.strip(b"\0"):
        length, _, rest = content.partition(b" ")
        size = int(length) if length.isdigit() else 0
        name, is_record, value = rest[: max(0, size - len(length) - 2)].partition(b"=")
        if not is_record:
            raise DataError(f"{where}: got {content[:20]!r}, expected a pax record")
        found[_text(name)] = _text(value)
        content = content[size:]
    return found


def _text(field: bytes) -> str:
    return bytes(field).partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _filled_up(at: int) -> int:
    return -(-at // BLOCK) * BLOCK


def _cut_off(where: str, stop: int, what: str) -> str:
    return (
        f"{where}: ends at byte {stop}, expected {what}; the tar is cut off, write or copy it again"
    )
