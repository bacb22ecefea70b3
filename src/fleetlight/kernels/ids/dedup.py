# SPDX-License-Identifier: Apache-2.0
"""Dedup: the distinct ids of a batch, and the position of each sample's id among them.

Ids of click logs repeat: usually half of a batch of 20,000 are repetitions. A temporary hash table
that fits the cache collects the distinct ids.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from fleetlight.errors import ConfigError
from fleetlight.kernels.arrays import Bools, Ids, Int32s, Int64s, as_ids
from fleetlight.kernels.compiling.kernel import kernel
from fleetlight.kernels.compiling.prefetching import prefetch
from fleetlight.kernels.ids.hashing import BUCKETS, bucket_of, hash_of

_AHEAD = 16


@dataclasses.dataclass(frozen=True)
class Deduped:
    """The distinct ids of a batch, grouped by server."""

    ids: Ids  #: server by server, each in order of first appearance
    inverse: Int32s  #: position among `ids` of each id of the batch
    starts: Int64s  #: the start of each server's ids, and the end

    def slice_of(self, server: int) -> slice:
        """The slice of `ids` that the server owns."""
        return slice(int(self.starts[server]), int(self.starts[server + 1]))

    def count_of(self, server: int) -> int:
        """How many of `ids` the server owns."""
        return int(self.starts[server + 1] - self.starts[server])


def dedup(ids: ArrayLike, servers: int = 1) -> Deduped:
    """The distinct ids, grouped by the server that owns them."""
    if not 1 <= servers <= BUCKETS:
        raise ConfigError(
            f"{servers} servers, expected 1 to {BUCKETS}: a server owns whole buckets"
        )
    unique, inverse = collect(as_ids(ids))
    starts = np.zeros(servers + 1, np.int64)
    if servers == 1:
        starts[1] = len(unique)
        return Deduped(unique, inverse, starts)
    grouped = np.empty_like(unique)
    moved = np.empty(len(unique), np.int32)
    _group(unique, servers, starts, moved, grouped)
    _follow(moved, inverse)
    return Deduped(grouped, inverse, starts)


def collect(ids: Ids) -> tuple[Ids, Int32s]:
    """The distinct ids in order of first appearance, and the position of each id among them."""
    unique = np.empty(len(ids), np.int64)
    inverse = np.empty(len(ids), np.int32)
    count = _collect(ids, _scratch(len(ids)), unique, inverse)
    return unique[:count], inverse


def member(ids: ArrayLike, of: ArrayLike) -> Bools:
    """A mask of `ids` that are among `of`."""
    ids, of = as_ids(ids), as_ids(of)
    table, unique = _scratch(len(of)), np.empty(len(of), np.int64)
    _collect(of, table, unique, np.empty(len(of), np.int32))
    found = np.empty(len(ids), np.bool_)
    _look_up(ids, table, unique, found)
    return found


def _scratch(count: int) -> Int32s:
    """An empty hash table with a load factor of at most one half for `count` ids."""
    if count >= 2**30:
        raise ConfigError(f"a batch of {count} ids, expected fewer than 2**30: split it")
    return np.zeros(1 << max(4, (2 * count - 1).bit_length()), np.int32)


@kernel
def _collect(ids: Ids, table: Int32s, unique: Int64s, inverse: Int32s) -> int:
    """Number the distinct ids; the table stores each number plus 1."""
    count = 0
    mask = np.uint64(len(table) - 1)
    for i in range(len(ids)):
        inverse[i] = np.int32(hash_of(ids[i]) & mask)
    for i in range(len(ids)):
        if i + _AHEAD < len(ids):
            prefetch(table, np.uint64(inverse[i + _AHEAD]))
        place = np.uint64(inverse[i])
        while table[place] != 0 and unique[np.uint64(table[place] - 1)] != ids[i]:
            place = (place + np.uint64(1)) & mask
        if table[place] == 0:
            unique[count] = ids[i]
            count += 1
            table[place] = count
        inverse[i] = table[place] - 1
    return count


@kernel
def _group(unique: Ids, servers: int, starts: Int64s, moved: Int32s, grouped: Int64s) -> None:
    """Group by server, stably; `moved` gets the new position of each id."""
    for i in range(len(unique)):
        moved[i] = bucket_of(unique[i]) * servers >> 14
        starts[moved[i] + 1] += 1
    for server in range(servers):
        starts[server + 1] += starts[server]
    following = starts.copy()
    for i in range(len(unique)):
        server = np.int64(moved[i])
        moved[i] = following[server]
        grouped[following[server]] = unique[i]
        following[server] += 1


@kernel
def _follow(moved: Int32s, inverse: Int32s) -> None:
    for i in range(len(inverse)):
        inverse[i] = moved[np.uint64(inverse[i])]


@kernel
def _look_up(ids: Ids, table: Int32s, unique: Int64s, found: Bools) -> None:
    mask = np.uint64(len(table) - 1)
    for i in range(len(ids)):
        place = hash_of(ids[i]) & mask
        while table[place] != 0 and unique[np.uint64(table[place] - 1)] != ids[i]:
            place = (place + np.uint64(1)) & mask
        found[i] = table[place] != 0
