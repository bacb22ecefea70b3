# SPDX-License-Identifier: Apache-2.0
"""Differences that own steps make to values shared with others, in one pass over the memory."""

from __future__ import annotations

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import kernel


@kernel
def difference(local: Values, since: Floats, out: Floats) -> None:
    """Write `local - since` to `out`, and let the next difference count from `local`."""
    for i in range(len(local)):
        out[i] = local[i] - since[i]
        since[i] = local[i]


@kernel
def rebase(local: Floats, since: Floats, now: Values, pending: Values, out: Floats) -> None:
    """Let the difference `local - since`, written to `out`, count from `now + pending`.

    `pending` may be empty, for zeros.
    """
    for i in range(len(local)):
        out[i] = local[i] - since[i]
        since[i] = now[i] + pending[i] if len(pending) else now[i]
        local[i] = since[i] + out[i]
