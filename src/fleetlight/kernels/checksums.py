# SPDX-License-Identifier: Apache-2.0
"""The checksum of a record of a journal.

Words are distributed over eight lanes in turn, so that the processor computes eight products at a
time. Each lane absorbs words, and the result absorbs lanes, by bijections. So a change of one word
always changes the 64-bit result; the checksum is its lower half.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import Ids, Uint64s
from fleetlight.kernels.compiling.kernel import kernel
from fleetlight.kernels.ids.hashing import FIRST, mix

LANES = 8
WORD_BYTES = 8
LEFT, RIGHT = np.uint64(27), np.uint64(64 - 27)


def checksum(data: bytes | memoryview | NDArray[np.uint8]) -> int:
    """The 32-bit checksum of some bytes."""
    found = np.frombuffer(data, np.uint8)
    whole = len(found) - len(found) % WORD_BYTES
    # kernels need aligned words
    words = np.require(found[:whole].view(np.int64), requirements="A")
    rest = int.from_bytes(found[whole:].tobytes(), "little")
    lanes = np.arange(LANES, dtype=np.uint64)
    return _checksum(words, rest, len(found), lanes) & 0xFFFFFFFF


@kernel
def _checksum(words: Ids, rest: int, size: int, lanes: Uint64s) -> int:
    whole = len(words) // LANES * LANES
    for at in range(0, whole, LANES):
        for n in range(LANES):
            turned = lanes[n] << LEFT | lanes[n] >> RIGHT
            lanes[n] = (turned ^ np.uint64(words[at + n])) * FIRST
    outcome = np.uint64(size)
    for n in range(LANES):
        outcome = mix(outcome ^ lanes[n])
    for at in range(whole, len(words)):
        outcome = mix(outcome ^ np.uint64(words[at]))
    return np.int64(mix(outcome ^ np.uint64(rest)))
