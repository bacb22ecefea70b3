# SPDX-License-Identifier: Apache-2.0
"""Read certificates and revocation lists in DER form, which `ssl` cannot. Pure."""

from __future__ import annotations

import dataclasses
import datetime

_INTEGER, _SEQUENCE, _VERSION = 0x02, 0x30, 0xA0
#: time formats with two-digit and four-digit years
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_NOT_A_CERTIFICATE = "its data is not that of a certificate"
_NOT_A_LIST = "its data is not that of a revocation list"


def validity(certificate: bytes) -> tuple[datetime.datetime, datetime.datetime]:
    """The first and last moment of a certificate; ValueError if it is none."""
    moments = _parts(_fields(certificate)[3][1])
    if len(moments) != 2:
        raise ValueError(_NOT_A_CERTIFICATE)
    return _moment(*moments[0]), _moment(*moments[1])


def number_and_issuer(certificate: bytes) -> tuple[int, bytes]:
    """The serial number and the issuer, by which a revocation list names a certificate."""
    fields = _fields(certificate)
    return _integer(fields[0][1]), fields[2][1]


def _fields(certificate: bytes) -> list[tuple[int, bytes]]:
    """Serial number, signature algorithm, issuer, validity, and what follows."""
    fields = _parts(_content(_content(certificate)))
    if fields and fields[0][0] == _VERSION:
        del fields[0]
    if len(fields) < 4 or fields[3][0] != _SEQUENCE:
        raise ValueError(_NOT_A_CERTIFICATE)
    return fields


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _content(data: bytes) -> bytes:
    """The content of the sequence that `data` starts with."""
    kind, inside, _ = _part(data)
    if kind != _SEQUENCE:
        raise ValueError(_NOT_A_CERTIFICATE)
    return inside


def _parts(data: bytes) -> list[tuple[int, bytes]]:
    """All tagged values of a sequence."""
    found = []
    while data:
        kind, inside, data = _part(data)
        found.append((kind, inside))
    return found


def _part(data: bytes) -> tuple[int, bytes, bytes]:
    """The tag and content of the first value, and the rest."""
    if len(data) < 2:
        raise ValueError("its data is cut short")
    kind, length, start = data[0], data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if len(data) < start + length:
        raise ValueError("its data is cut short")
    return kind, data[start : start + length], data[start + length :]


def _moment(kind: int, text: bytes) -> datetime.datetime:
    """Parse a time of either format."""
    if kind not in _TIMES:
        raise ValueError(_NOT_A_CERTIFICATE)
    found = datetime.datetime.strptime(text.decode("ascii", "replace"), _TIMES[kind])
    return found.replace(tzinfo=datetime.timezone.utc)


@dataclasses.dataclass(frozen=True)
class RevokedList:
    """A revocation list: its issuer, its validity and its serial numbers."""

    issuer: bytes
    first: datetime.datetime
    #: None if the list has no end
    last: datetime.datetime | None
    numbers: frozenset[int]


def revoked_list(data: bytes) -> RevokedList:
    """Read a revocation list; ValueError if it is none."""
    fields = _parts(_content(_content(data)))
    if fields and fields[0][0] == _INTEGER:
        del fields[0]
    # signature algorithm, issuer, first moment, then optional fields
    if len(fields) < 3 or fields[1][0] != _SEQUENCE:
        raise ValueError(_NOT_A_LIST)
    (_, (_, issuer), first, *rest) = fields
    last = _moment(*rest.pop(0)) if rest and rest[0][0] in _TIMES else None
    entries = _parts(rest[0][1]) if rest and rest[0][0] == _SEQUENCE else []
    numbers = frozenset(_integer(_parts(entry)[0][1]) for _, entry in entries)
    return RevokedList(issuer, _moment(*first), last, numbers)
