# SPDX-License-Identifier: Apache-2.0
"""The first values of a row: a pure function of seed, id and column.

So they depend neither on the order of ids nor on the number of servers, and untrained rows need
not be stored. Integers, and one multiplication and one addition of doubles, give the same bits on
every machine and in the NumPy twin.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.kernels.arrays import Ids, Matrix, as_ids, room
from fleetlight.kernels.compiling.kernel import kernel, part
from fleetlight.kernels.ids.hashing import GAMMA, hash_of, mix

Kind = Literal["uniform", "constant", "zeros", "normal"]
KINDS = ("uniform", "constant", "zeros", "normal")

#: a uniform value has the precision of a float32, 24 bits
UNIFORM_BITS = 24
#: A normal value is the sum of twelve 16-bit numbers minus their mean. Its standard deviation is
#: sqrt(2**32 - 1), 2**16 to ten digits; no value is more than 6 deviations from 0.
NORMAL_MEAN = 393210
NORMAL_BITS = 16


@dataclasses.dataclass(frozen=True)
class Initializer:
    """First values: uniform in a..b, constant a, zeros, or normal with mean a and deviation b."""

    kind: Kind = "zeros"
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"initializer {self.kind!r}: {did_you_mean(self.kind, KINDS)}")
        if not all(abs(number) < 1e38 for number in (self.a, self.b)):
            raise ConfigError(f"initializer {self.kind}({self.a}, {self.b}): expected numbers")
        for name in ("a", "b"):  # -0.0 becomes 0.0
            object.__setattr__(self, name, float(getattr(self, name)) + 0.0)

    @property
    def is_normal(self) -> bool:
        """Whether values are normal: sums of twelve numbers."""
        return self.kind == "normal"

    @property
    def offset(self) -> float:
        """The value for the random number 0."""
        return 0.0 if self.kind == "zeros" else self.a

    @property
    def step(self) -> float:
        """The difference of the values for two successive random numbers."""
        if self.kind == "uniform":
            return (self.b - self.a) * 2.0**-UNIFORM_BITS
        return self.b * 2.0**-NORMAL_BITS if self.is_normal else 0.0


def table_seed(job_seed: int, table_name: str) -> int:
    """The seed of one table of a job, the same in every process and run."""
    key = f"{job_seed}:{table_name}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def first_values(ids: ArrayLike, dim: int, seed: int, initializer: Initializer) -> Matrix:
    """The first weights of each id."""
    ids = as_ids(ids)
    values = room(None, (len(ids), dim))
    _fill(ids, as_int64(seed), initializer.is_normal, initializer.offset, initializer.step, values)
    return values


def as_int64(seed: int) -> int:
    """Any integer, wrapped to 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


@part
def stream_of(one: np.int64, seed: int) -> np.uint64:
    """The start of the random words of an id."""
    return mix(hash_of(one) ^ np.uint64(seed))


@part
def value_at(
    stream: np.uint64, column: int, normal: bool, offset: float, step: float
) -> np.float32:
    """The first value of one column."""
    if normal:
        number = np.int64(_sum_of_twelve(stream + np.uint64(3 * column) * GAMMA)) - NORMAL_MEAN
    else:
        number = np.int64(mix(stream + np.uint64(column) * GAMMA) >> np.uint64(64 - UNIFORM_BITS))
    return np.float32(np.float64(number) * step + offset)


@part
def _sum_of_twelve(stream: np.uint64) -> np.uint64:
    total = np.uint64(0)
    for k in range(3):
        word = mix(stream + np.uint64(k) * GAMMA)
        total += word & np.uint64(0xFFFF)
        total += (word >> np.uint64(16)) & np.uint64(0xFFFF)
        total += (word >> np.uint64(32)) & np.uint64(0xFFFF)
        total += word >> np.uint64(48)
    return total


@kernel
def _fill(ids: Ids, seed: int, normal: bool, offset: float, step: float, values: Matrix) -> None:
    for i in range(len(ids)):
        stream = stream_of(ids[i], seed)
        for c in range(values.shape[1]):
            values[i, c] = value_at(stream, c, normal, offset, step)
