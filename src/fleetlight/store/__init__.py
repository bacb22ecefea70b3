# SPDX-License-Identifier: Apache-2.0
"""Objects by name in buckets, on file systems and in local folders, behind one small interface.

This package imports neither torch nor numpy, and each kind of store when a URL needs it.

`store` keeps objects by name under a URL. `protocol.py` has `ObjectStore`: get, ranges, put,
create if absent, compare and swap, list, delete. `local.py` keeps objects as files of a folder,
`buckets.py` in a bucket (obstore), `filesystems.py` on any other file system (fsspec, whose
conditions are not atomic). `choosing.py` chooses by the URL. `retries.py` repeats what may pass
until a deadline; `failures.py` (pure) says what an error of a bucket means, and never repeats the
bucket's reply.
"""

from fleetlight.store.choosing import store_at
from fleetlight.store.protocol import Data, Entry, Object, ObjectStore, Span
from fleetlight.store.urls import Location, absolute, is_url, joined, shown

__all__ = [
    "Data",
    "Entry",
    "Location",
    "Object",
    "ObjectStore",
    "Span",
    "absolute",
    "is_url",
    "joined",
    "shown",
    "store_at",
]
