# SPDX-License-Identifier: Apache-2.0
"""From when to when a certificate is valid: the one thing `ssl` does not tell before it is used."""

from __future__ import annotations

import datetime

_SEQUENCE, _VERSION = 0x30, 0xA0
#: years in two digits | in four
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18


def validity(certificate: bytes) -> tuple[datetime.datetime, datetime.datetime]:
    """First and last moment of a certificate in DER form; ValueError when it is none."""
    fields = _parts(_content(_content(certificate)))
    if fields and fields[0][0] == _VERSION:
        del fields[0]
    # serial number, signature algorithm, issuer, validity
    if len(fields) < 4 or fields[3][0] != _SEQUENCE:
        raise ValueError("its data is not that of a certificate")
    moments = _parts(fields[3][1])
    if len(moments) != 2:
        raise ValueError("its data is not that of a certificate")
    return _moment(*moments[0]), _moment(*moments[1])


def _content(data: bytes) -> bytes:
    """What is inside the sequence that `data` starts with."""
    kind, content, _ = _part(data)
    if kind != _SEQUENCE:
        raise ValueError("its data is not that of a certificate")
    return content


def _parts(data: bytes) -> list[tuple[int, bytes]]:
    """All tagged values of a sequence."""
    parts = []
    while data:
        kind, content, data = _part(data)
        parts.append((kind, content))
    return parts


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
    formats = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
    if kind not in formats:
        raise ValueError("its data is not that of a certificate")
    found = datetime.datetime.strptime(text.decode("ascii", "replace"), formats[kind])
    return found.replace(tzinfo=datetime.timezone.utc)
