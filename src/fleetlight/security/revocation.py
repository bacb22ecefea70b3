# SPDX-License-Identifier: Apache-2.0
"""What a list of revoked certificates says: `ssl` loads one and tells nothing of it. Pure."""

from __future__ import annotations

import dataclasses
import datetime

from fleetlight.security.validity import INTEGER, SEQUENCE, TIMES, content, moment, parts, whole

_NOT_ONE = "its data is not that of a list of revoked certificates"


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
    fields = parts(content(content(data)))
    if fields and fields[0][0] == INTEGER:
        del fields[0]
    # signature algorithm, issuer, first moment, and then optional parts
    if len(fields) < 3 or fields[1][0] != SEQUENCE:
        raise ValueError(_NOT_ONE)
    (_, (_, issuer), first, *rest) = fields
    last = moment(*rest.pop(0)) if rest and rest[0][0] in TIMES else None
    entries = parts(rest[0][1]) if rest and rest[0][0] == SEQUENCE else []
    numbers = frozenset(whole(parts(entry)[0][1]) for _, entry in entries)
    return RevokedList(issuer, moment(*first), last, numbers)
