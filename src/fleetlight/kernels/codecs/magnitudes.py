# SPDX-License-Identifier: Apache-2.0
"""Magnitudes: the k largest of an array in linear time, and whether all values are finite.

Without the sign bit, a float32 compares like the integer of the same bits. A radix select on these
integers finds the k-th largest: it counts how many integers have each digit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import DivergedError
from fleetlight.kernels.arrays import Floats, Int32s, Int64s, Positions, Values
from fleetlight.kernels.compiling.kernel import kernel, part

#: the shifts of the three digits of the 31 bits
_HIGH, _MIDDLE, _LOW = 20, 9, 0
_DIGITS = 1 << 11
_UNSIGNED = 0x7FFFFFFF
#: the bits of infinity without its sign; those of a NaN are larger
_INFINITY = 0x7F800000


def largest(values: Values, places: Int32s) -> None:
    """Write the places of the `len(places)` largest magnitudes, in ascending order.

    Of equal values the first ones are chosen. A NaN is larger than infinity.
    """
    _largest(values.view(np.int32), places)


def take_out(values: Floats, places: Positions, taken: Floats) -> None:
    """Move the values at `places` to `taken`, and leave zeros."""
    _take_out(values, places, taken)


def add_at(places: Positions, values: Values, total: Floats) -> None:
    """Add received values; a place outside of the total is an error."""
    added = _add_at(places, values, total)
    if added < len(places):
        raise DivergedError(
            f"a message has a value for place {places[added]}, expected places from 0 to "
            f"{len(total) - 1}: the workers reduce different gradients, or the message is damaged"
        )


def all_finite(array: NDArray[Any]) -> bool:
    """False when the array has a NaN or an infinity."""
    if array.dtype == np.float32 and array.flags.c_contiguous:
        return _maximum(array.reshape(-1).view(np.int32)) < _INFINITY
    return bool(np.isfinite(array).all())


@kernel
def _maximum(bits: Positions) -> int:
    return int(largest_bits(bits))


@part
def largest_bits(bits: Positions) -> np.int32:
    """The largest magnitude, as its bits."""
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.int32(_UNSIGNED))
    return most


@kernel
def _largest(bits: Positions, places: Int32s) -> None:
    wanted = len(places)
    counts = np.zeros(_DIGITS, np.int64)
    for i in range(len(bits)):
        counts[(bits[i] & _UNSIGNED) >> _HIGH] += 1
    prefix, wanted = _digit(counts, wanted)
    for i in range(len(bits)):
        key = bits[i] & _UNSIGNED
        if key >> _HIGH == prefix:
            counts[(key >> _MIDDLE) & (_DIGITS - 1)] += 1
    digit, wanted = _digit(counts, wanted)
    prefix = prefix * _DIGITS + digit
    for i in range(len(bits)):
        key = bits[i] & _UNSIGNED
        if key >> _MIDDLE == prefix:
            counts[key & ((1 << _MIDDLE) - 1)] += 1
    digit, wanted = _digit(counts, wanted)
    _write(bits, (prefix << _MIDDLE) + digit, wanted, places)


@part
def _digit(counts: Int64s, wanted: int) -> tuple[int, int]:
    """The digit of the smallest wanted value, and how many values with it are wanted."""
    digit = len(counts) - 1
    while digit > 0 and counts[digit] < wanted:
        wanted -= counts[digit]
        digit -= 1
    counts[:] = 0
    return digit, wanted


@part
def _write(bits: Positions, smallest: int, ties: int, places: Int32s) -> None:
    """Write the places of values above the smallest, and of the first `ties` equal to it."""
    at = 0
    for i in range(len(bits)):
        key = bits[i] & _UNSIGNED
        if key >= smallest:
            if key == smallest:
                if ties == 0:
                    continue
                ties -= 1
            places[at] = i
            at += 1


@kernel
def _take_out(values: Floats, places: Positions, taken: Floats) -> None:
    for i in range(len(places)):
        taken[i] = values[places[i]]
        values[places[i]] = 0


@kernel
def _add_at(places: Positions, values: Values, total: Floats) -> int:
    """Return how many values were added before the first place outside of the total."""
    for i in range(len(places)):
        if not 0 <= places[i] < len(total):
            return i
        total[places[i]] += values[i]
    return len(places)
