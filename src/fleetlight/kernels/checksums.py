# SPDX-License-Identifier: Apache-2.0
"""Whether bytes are those that were written: asked of every record of a journal.

Words go to eight lanes by turns, so that a processor need not wait for one product before it begins
the next. Lanes take words in, and the outcome lanes, by bijections: where one word is another one,
so are the 64 bits at the end, of which half are answered.
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
    """32 bits that tell."""
    found = np.frombuffer(data, np.uint8)
    whole = len(found) - len(found) % WORD_BYTES
    # kernels take words only from where words may lie
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
