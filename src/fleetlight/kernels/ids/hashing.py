# SPDX-License-Identifier: Apache-2.0
"""The hash of an id, which determines its bucket, its server and its line in a table.

The top 14 bits of the hash are the virtual bucket. Servers own contiguous ranges of buckets, and
checkpoints are written in bucket order, so any number of servers can load ranges of a file. Tables
use the low bits, which stay uniform among the ids of one server.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from fleetlight.errors import ConfigError
from fleetlight.kernels.arrays import Ids, Int32s, Uint64s, as_ids
from fleetlight.kernels.compiling.kernel import kernel, part

#: part of the checkpoint format
BUCKETS = 1 << 14
BUCKET_SHIFT = np.uint64(64 - 14)

W = TypeVar("W", np.uint64, Uint64s)

GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)


@part
def mix(words: W) -> W:
    """One step of SplitMix64, a bijection of 64-bit words. NumPy takes arrays, kernels one word."""
    z = words + GAMMA
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    return z ^ (z >> np.uint64(31))


@part
def hash_of(one: np.int64) -> np.uint64:
    """The hash of one id."""
    return mix(np.uint64(one))


@part
def bucket_of(one: np.int64) -> np.int64:
    """The virtual bucket of one id."""
    return np.int64(hash_of(one) >> BUCKET_SHIFT)


def splitmix64(ids: ArrayLike) -> Uint64s:
    """The 64-bit hash of each id."""
    ids = as_ids(ids)
    hashes = np.empty(len(ids), np.uint64)
    _hash(ids, hashes)
    return hashes


def buckets(ids: ArrayLike) -> Int32s:
    """The virtual bucket of each id: the top bits of its hash."""
    return servers_of(ids, BUCKETS)


def servers_of(ids: ArrayLike, servers: int) -> Int32s:
    """The server that owns each id's bucket."""
    if not 1 <= servers <= BUCKETS:
        raise ConfigError(
            f"{servers} servers, expected 1 to {BUCKETS}: a server owns whole buckets"
        )
    ids = as_ids(ids)
    owners = np.empty(len(ids), np.int32)
    _own(ids, servers, owners)
    return owners


@kernel
def _hash(ids: Ids, hashes: Uint64s) -> None:
    for i in range(len(ids)):
        hashes[i] = hash_of(ids[i])


@kernel
def _own(ids: Ids, servers: int, owners: Int32s) -> None:
    for i in range(len(ids)):
        owners[i] = bucket_of(ids[i]) * servers >> 14
