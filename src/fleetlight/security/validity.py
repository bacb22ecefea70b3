# SPDX-License-Identifier: Apache-2.0
"""When a certificate is valid, and whose it is: what `ssl` does not tell before it is used."""

from __future__ import annotations

import datetime

INTEGER, SEQUENCE, _VERSION = 0x02, 0x30, 0xA0
#: years in two digits | in four
TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


def validity(certificate: bytes) -> tuple[datetime.datetime, datetime.datetime]:
    """First and last moment of a certificate in DER form; ValueError when it is none."""
    moments = parts(_fields(certificate)[3][1])
    if len(moments) != 2:
        raise ValueError("its data is not that of a certificate")
    return moment(*moments[0]), moment(*moments[1])


def number_and_issuer(certificate: bytes) -> tuple[int, bytes]:
    """By which a list of revoked certificates names a certificate in DER form."""
    fields = _fields(certificate)
    return whole(fields[0][1]), fields[2][1]


def _fields(certificate: bytes) -> list[tuple[int, bytes]]:
    """Serial number, signature algorithm, issuer, validity, and what follows."""
    fields = parts(content(content(certificate)))
    if fields and fields[0][0] == _VERSION:
        del fields[0]
    if len(fields) < 4 or fields[3][0] != SEQUENCE:
        raise ValueError("its data is not that of a certificate")
    return fields


def whole(data: bytes) -> int:
    """A number."""
    return int.from_bytes(data, "big", signed=True)


def content(data: bytes) -> bytes:
    """What is inside the sequence that `data` starts with."""
    kind, inside, _ = _part(data)
    if kind != SEQUENCE:
        raise ValueError("its data is not that of a certificate")
    return inside


def parts(data: bytes) -> list[tuple[int, bytes]]:
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


def moment(kind: int, text: bytes) -> datetime.datetime:
    """A time, in either of its two forms."""
    if kind not in TIMES:
        raise ValueError("its data is not that of a certificate")
    found = datetime.datetime.strptime(text.decode("ascii", "replace"), TIMES[kind])
    return found.replace(tzinfo=datetime.timezone.utc)
