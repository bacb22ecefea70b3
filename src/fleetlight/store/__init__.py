# SPDX-License-Identifier: Apache-2.0
"""Objects by name in buckets, on file systems and in local folders, behind one small interface.

This package imports neither torch nor numpy, and each kind of store when a URL needs it.
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
