# SPDX-License-Identifier: Apache-2.0
"""The manifest under a URL, and the copies of it in the folders of generations."""

from __future__ import annotations

import dataclasses
import logging
import re

import msgspec

from fleetlight.checkpoint.storage.manifest import MANIFEST
from fleetlight.errors import MissingObjectError
from fleetlight.store import Object, ObjectStore, joined

FOLDER = re.compile(r"generation-(\d{6,})-[0-9a-f]+/")
_log = logging.getLogger(__name__)


def current_manifest(store: ObjectStore) -> Object | None:
    """The manifest with its version; None if there is none.

    A manifest that arrived half, before the save that wrote it lost the connection, is replaced by
    the copy in the folder of the newest generation: that was written before, when all files of the
    generation had arrived.
    """
    try:
        found = store.get(MANIFEST)
    except MissingObjectError:
        return None
    if _is_whole(found):
        return found
    copy = _newest_copy(store)
    if copy is None:
        return found
    name, data = copy
    _log.warning("%s is damaged; %s is read in its place", joined(store.url, MANIFEST), name)
    return dataclasses.replace(found, size=data.size, data=data.data)


def _newest_copy(store: ObjectStore) -> tuple[str, Object] | None:
    """The copy of the newest generation that has a whole one, and its name."""
    copies = []
    for entry in store.list("generation-"):
        match = FOLDER.match(entry.name)
        if match and entry.name == match[0] + MANIFEST:
            copies.append((int(match[1]), entry.name))
    for _, name in sorted(copies, reverse=True):
        try:
            found = store.get(name)
        except MissingObjectError:
            continue
        if _is_whole(found):
            return name, found
    return None


def _is_whole(found: Object) -> bool:
    try:
        msgspec.json.decode(bytes(found.data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
