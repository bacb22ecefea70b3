# SPDX-License-Identifier: Apache-2.0
"""What certificates and lists of revoked ones say in DER form: `ssl` tells none of it. Pure."""

from __future__ import annotations

import dataclasses
import datetime

_INTEGER, _SEQUENCE, _VERSION = 0x02, 0x30, 0xA0
#: years in two digits | in four
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_NOT_ONE = "its data is not that of a list of revoked certificates"


def validity(certificate: bytes) -> tuple[datetime.datetime, datetime.datetime]:
    """First and last moment of a certificate in DER form; ValueError when it is none."""
    moments = _parts(_fields(certificate)[3][1])
    if len(moments) != 2:
        raise ValueError("its data is not that of a certificate")
    return _moment(*moments[0]), _moment(*moments[1])


def number_and_issuer(certificate: bytes) -> tuple[int, bytes]:
    """By which a list of revoked certificates names a certificate in DER form."""
    fields = _fields(certificate)
    return _integer(fields[0][1]), fields[2][1]


def _fields(certificate: bytes) -> list[tuple[int, bytes]]:
    """Serial number, signature algorithm, issuer, validity, and what follows."""
    fields = _parts(_content(_content(certificate)))
    if fields and fields[0][0] == _VERSION:
        del fields[0]
    if len(fields) < 4 or fields[3][0] != _SEQUENCE:
        raise ValueError("its data is not that of a certificate")
    return fields


def _integer(data: bytes) -> int:
    """A number."""
    return int.from_bytes(data, "big", signed=True)


def _content(data: bytes) -> bytes:
    """What is inside the sequence that `data` starts with."""
    kind, inside, _ = _part(data)
    if kind != _SEQUENCE:
        raise ValueError("its data is not that of a certificate")
    return inside


def _parts(data: bytes) -> list[tuple[int, bytes]]:
    """All tagged values of a sequence."""
    found = []
    while data:
        kind, inside, data = _part(data)
        found.append((kind, inside))
    return found


def _part(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag and content of the first value, and what follows it."""
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
    """A time, in either of its two forms."""
    if kind not in _TIMES:
        raise ValueError("its data is not that of a certificate")
    found = datetime.datetime.strptime(text.decode("ascii", "replace"), _TIMES[kind])
    return found.replace(tzinfo=datetime.timezone.utc)


@dataclasses.dataclass(frozen=True)
class RevokedList:
    """One list: who has signed it, from when to when it is valid, and the numbers on it."""

    issuer: bytes
    first: datetime.datetime
    #: until when; None: it does not say
    last: datetime.datetime | None
    numbers: frozenset[int]


def revoked_list(data: bytes) -> RevokedList:
    """A list in DER form; ValueError when it is none."""
    fields = _parts(_content(_content(data)))
    if fields and fields[0][0] == _INTEGER:
        del fields[0]
    # signature algorithm, issuer, first moment, and then optional parts
    if len(fields) < 3 or fields[1][0] != _SEQUENCE:
        raise ValueError(_NOT_ONE)
    (_, (_, issuer), first, *rest) = fields
    last = _moment(*rest.pop(0)) if rest and rest[0][0] in _TIMES else None
    entries = _parts(rest[0][1]) if rest and rest[0][0] == _SEQUENCE else []
    numbers = frozenset(_integer(_parts(entry)[0][1]) for _, entry in entries)
    return RevokedList(issuer, _moment(*first), last, numbers)
