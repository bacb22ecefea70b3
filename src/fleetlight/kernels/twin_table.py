# SPDX-License-Identifier: Apache-2.0
"""`TwinTable`: RowTable as a dictionary of rows, slow and readable, the oracle of its tests."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import (
    Bools,
    Choices,
    Doubles,
    Floats,
    Grid,
    Ids,
    Int32s,
    Int64s,
    Matrix,
    Positions,
    Uint64s,
    Values,
)
from fleetlight.kernels.copy_on_write.pending_rows import Batch
from fleetlight.kernels.ids.dedup import Deduped
from fleetlight.kernels.ids.hashing import FIRST, GAMMA, mix
from fleetlight.kernels.ids.pooling import EACH, WEIGHTED, Pooling
from fleetlight.kernels.rows.first_values import NORMAL_BITS, NORMAL_MEAN, UNIFORM_BITS, Initializer
from fleetlight.kernels.rows.updates import rule_named
from fleetlight.kernels.rule import Rule


def splitmix64(ids: Ids) -> Uint64s:
    """The hash of each id."""
    return mix(ids.astype(np.uint64))


def buckets(ids: Ids) -> Int32s:
    """The top 14 bits of each hash."""
    return (splitmix64(ids) >> np.uint64(50)).astype(np.int32)


def servers_of(ids: Ids, servers: int) -> Int32s:
    """Server s owns the buckets from s/servers to (s+1)/servers of all."""
    return (buckets(ids).astype(np.int64) * servers // 2**14).astype(np.int32)


def first_values(ids: Ids, dim: int, seed: int, initializer: Initializer) -> Matrix:
    """The first weights of each id, from one or three random words for each value."""
    streams = mix(splitmix64(ids) ^ np.uint64(seed % 2**64))
    columns = np.arange(dim, dtype=np.uint64)
    if initializer.kind in ("zeros", "constant"):
        value = initializer.a if initializer.kind == "constant" else 0.0
        return np.full((len(ids), dim), value, np.float32)
    if initializer.kind == "uniform":
        words = mix(streams[:, None] + columns * GAMMA)
        numbers = words >> np.uint64(64 - UNIFORM_BITS)
        step = (initializer.b - initializer.a) / 2**UNIFORM_BITS
        return (numbers.astype(np.float64) * step + initializer.a).astype(np.float32)
    places = columns[:, None] * np.uint64(3) + np.arange(3, dtype=np.uint64)
    words = mix(streams[:, None, None] + places * GAMMA)
    sixteens = words[..., None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)
    numbers = sixteens.astype(np.int64).sum((2, 3)) - NORMAL_MEAN
    step = initializer.b / 2**NORMAL_BITS
    return (numbers.astype(np.float64) * step + initializer.a).astype(np.float32)


def dedup(ids: Ids, servers: int) -> Deduped:
    """Distinct ids grouped by server, in order of first appearance in each group."""
    unique = np.array(list(dict.fromkeys(ids.tolist())), np.int64)
    owners = servers_of(unique, servers)
    grouped = unique[np.argsort(owners, kind="stable")]
    place = {one: k for k, one in enumerate(grouped.tolist())}
    inverse = np.array([place[one] for one in ids.tolist()], np.int32)
    starts = np.searchsorted(np.sort(owners), np.arange(servers + 1)).astype(np.int64)
    return Deduped(grouped, inverse, starts)


def member(ids: Ids, of: Ids) -> Bools:
    """Which ids are among `of`."""
    return np.isin(ids, of)


def gather(rows: Grid, inverse: Positions) -> Matrix:
    """The row of each sample."""
    return rows[inverse]


def sum_by(grads: Grid, inverse: Positions, count: int) -> Matrix:
    """Add each gradient to the row of its id, in sample order."""
    sums = np.zeros((count, grads.shape[1]), np.float32)
    for row, grad in zip(inverse, grads, strict=True):
        sums[row] += grad
    return sums


def gather_bags(
    rows: Grid, inverse: Positions, offsets: Ids, weights: Values | None, mode: str
) -> tuple[Matrix, Choices | None]:
    """Reduce each bag separately."""
    bags = np.zeros((len(offsets) - 1, rows.shape[1]), np.float32)
    chosen = np.full(bags.shape, -1, np.int32)
    for b, inside in enumerate(_bags(offsets)):
        members = rows[inverse[inside]]
        if not len(members):
            continue
        if mode == "max":
            bags[b] = members.max(0)
            chosen[b] = inverse[inside][members.argmax(0)]
        else:
            shares = np.ones(len(members)) if weights is None else weights[inside]
            bags[b] = shares @ members / (len(members) if mode == "mean" else 1)
    return bags, chosen if mode == "max" else None


def spread_bags(
    grads: Grid,
    inverse: Positions,
    offsets: Ids,
    weights: Values | None,
    mode: str,
    count: int,
    chosen: Choices | None,
) -> Matrix:
    """Add each bag's gradient to all its members, or in each column to the chosen member."""
    out = np.zeros((count, grads.shape[1]), np.float32)
    for b, inside in enumerate(_bags(offsets)):
        if mode == "max" and chosen is not None:
            for c in np.flatnonzero(chosen[b] >= 0):
                out[chosen[b, c], c] += grads[b, c]
            continue
        length = inside.stop - inside.start
        for i in range(inside.start, inside.stop):
            share = 1.0 if weights is None else weights[i]
            out[inverse[i]] += grads[b] * share / (length if mode == "mean" else 1)
    return out


def weight_grads(grads: Grid, rows: Grid, inverse: Positions, offsets: Ids) -> Floats:
    """The product of each member with its bag's gradient."""
    bag = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return np.asarray((grads[bag] * rows[inverse]).sum(1), np.float32)


def pool(rows: Values, pooling: Pooling) -> tuple[Floats, Int32s]:
    """Each feature separately; a row for each id is a bag of one id."""
    out = np.zeros(pooling.size, np.float32)
    chosen = np.full(pooling.size if pooling.has_maxima else 0, -1, np.int32)
    for one in _features(pooling):
        mine = rows[one.first :][: (len(rows) - one.first) // one.dim * one.dim]
        bags, places = gather_bags(
            mine.reshape(-1, one.dim), one.inverse, one.offsets, one.weights, one.mode
        )
        out[one.results] = bags
        if places is not None:
            chosen[one.results] = places
    return out, chosen


def spread(grads: Values, pooling: Pooling, count: int, chosen: Int32s) -> Floats:
    """Each feature separately."""
    out = np.zeros(count, np.float32)
    for one in _features(pooling):
        rows = (count - one.first) // one.dim
        places = chosen[one.results] if one.mode == "max" else None
        summed = spread_bags(
            grads[one.results], one.inverse, one.offsets, one.weights, one.mode, rows, places
        )
        out[one.first :][: summed.size] += summed.reshape(-1)
    return out


def position_grads(grads: Values, rows: Values, pooling: Pooling) -> Floats:
    """Each feature with weights separately."""
    out = np.zeros(len(pooling.inverse), np.float32)
    for one in _features(pooling):
        if one.weights is not None:
            mine = rows[one.first :][: (len(rows) - one.first) // one.dim * one.dim]
            dots = weight_grads(
                grads[one.results], mine.reshape(-1, one.dim), one.inverse, one.offsets
            )
            out[one.span] = dots
    return out


class _OneFeature:
    """One feature of a pooling as bags: with the mode EACH, of one id or of none."""

    def __init__(self, pooling: Pooling, number: int) -> None:
        self.first, self.dim, mode, at, step = pooling.layout[number].tolist()
        bounds = pooling.bounds[number]
        self.span = slice(int(bounds[0]), int(bounds[-1]))
        inverse = pooling.inverse[self.span]
        self.inverse, self.offsets = inverse, bounds - bounds[0]
        self.mode = ("sum", "mean", "max", "sum", "sum")[mode]
        self.weights = pooling.weights[self.span] if mode == WEIGHTED else None
        if mode == EACH:
            self.inverse, step = inverse[inverse >= 0], self.dim
            self.offsets = np.concatenate(([0], np.cumsum(inverse >= 0)))
        starts = at + np.arange(len(self.offsets) - 1) * step
        #: the places of the results in the flat array
        self.results = starts[:, None] + np.arange(self.dim)


def _features(pooling: Pooling) -> list[_OneFeature]:
    return [_OneFeature(pooling, number) for number in range(len(pooling.layout))]


def update(
    rule: Rule, weights: Matrix, state: Matrix, grads: Grid, hyper: NDArray[np.float64]
) -> tuple[Matrix, Matrix]:
    """Weights and state of rows after one step of a rule, in double precision."""
    weights_, state_, grads_ = (a.astype(np.float64) for a in (weights, state, grads))
    weights_after, state_after = rule.twin(weights_, state_, grads_, hyper)
    return weights_after.astype(np.float32), state_after.astype(np.float32)


def _bags(offsets: Ids) -> list[slice]:
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(offsets)]


def read_copies(rows: Matrix, numbers: Ids, oldest: int, out: Matrix) -> Ids:
    """Read the weights; return the positions without a row, or last used before `oldest`."""
    here = numbers >= 0
    here[here] = rows[numbers[here], -1] >= oldest
    out[here] = rows[numbers[here], : out.shape[1]]
    return np.flatnonzero(~here)


def mark_copies(rows: Matrix, numbers: Ids, window: int) -> Ids:
    """Mark rows as used in this window; return the numbers of newly marked rows."""
    fresh = numbers[rows[numbers, -1] != window]
    rows[fresh, -1] = window
    return fresh


def renew_copies(rows: Matrix, numbers: Ids, arrived: Grid) -> None:
    """New rows take the values of the server; others add the server's change since their copy."""
    dim = arrived.shape[1]
    copy = slice(-1 - dim, -1)
    for number, values in zip(numbers, arrived, strict=True):
        if number < 0:
            continue
        row = rows[number]
        row[:dim] = values if row[-1] == 0 else row[:dim] + (values - row[copy])
        row[copy] = values


def share_copies(rows: Matrix, numbers: Ids, among: int, dim: int) -> Matrix:
    """The weights minus their copies, divided by `among`."""
    copy = slice(-1 - dim, -1)
    differences = np.zeros((len(numbers), dim), np.float32)
    for i, number in enumerate(numbers):
        differences[i] = (rows[number, :dim] - rows[number, copy]) / np.float32(among)
        rows[number, copy] += differences[i]
    return differences


def lay_aside(places: Int32s, rows: Matrix, aside: Matrix, used: int, numbers: Ids) -> Ids:
    """Copy rows without a place to the next places; return their positions in `numbers`."""
    fresh: list[int] = []
    for i, number in enumerate(numbers):
        if 0 <= number < len(places) and places[number] == 0:
            aside[used + len(fresh)] = rows[number]
            fresh.append(i)
            places[number] = used + len(fresh)
    return np.array(fresh, np.int64)


def read_as_they_were(
    places: Int32s, rows: Matrix, aside: Matrix, numbers: Int32s, done: int
) -> Matrix:
    """Read copied rows from `aside`, and the others from the table."""
    out = rows[numbers]
    moved = places[numbers] > 0
    out[moved] = aside[places[numbers][moved] - 1]
    places[numbers] = done
    return out


def take_rows(
    taken: set[int], top: int, rows: Matrix, numbers: Ids, ids: Ids, start: int, batch: Batch
) -> int:
    """Copy pending rows below `top` into a batch until it is full; return the position reached."""
    for i in range(start, len(numbers)):
        number, at = int(numbers[i]), batch.used
        if 0 <= number < top and number not in taken:
            if batch.is_full:
                return i
            taken.add(number)
            batch.rows[at], batch.numbers[at], batch.ids[at] = rows[number], number, ids[i]
            batch.used += 1
    return len(numbers)


def checksum(data: bytes) -> int:
    """Absorb words in rows of eight, one for each lane, then the lanes, then the rest."""
    whole = len(data) // 8
    words = np.frombuffer(data[: 8 * whole], np.uint64)
    rows = words[: whole // 8 * 8].reshape(-1, 8)
    lanes = np.arange(8, dtype=np.uint64)
    for row in rows:
        turned = lanes << np.uint64(27) | lanes >> np.uint64(37)
        lanes = (turned ^ row) * FIRST
    rest = np.frombuffer(data[8 * whole :].ljust(8, b"\0"), np.uint64)
    outcome = np.array([len(data)], np.uint64)
    for word in itertools.chain(lanes, words[rows.size :], rest):
        outcome = mix(outcome ^ word)
    return int(outcome[0]) & 0xFFFFFFFF


class TwinTable:
    """Has the methods of RowTable."""

    def __init__(
        self,
        dim: int,
        rule: Rule | str,
        seed: int = 0,
        initializer: Initializer | None = None,
        meta_width: int = 0,
    ) -> None:
        self.dim = dim
        self.rule = rule_named(rule) if isinstance(rule, str) else rule
        self.seed = seed
        self.initializer = initializer or Initializer()
        self.meta_width = meta_width
        self.state_width = self.rule.state_width(dim)
        self.width = dim + self.state_width + meta_width
        self.rows: Matrix = np.zeros((0, self.width), np.float32)
        self._number: dict[int, int] = {}
        self._freed: list[int] = []

    def __len__(self) -> int:
        return len(self._number)

    @property
    def freed(self) -> Int64s:
        """The numbers of rows that are not in use."""
        return np.array(self._freed, np.int64)

    @property
    def numbers(self) -> Int64s:
        """The numbers of all rows in use, ascending."""
        return np.array(sorted(self._number.values()), np.int64)

    def pull(self, ids: Ids, insert: bool = True) -> Matrix:
        """The weights of each id; `insert` gives unknown ids a row, else they read first values."""
        if insert:
            self.insert(ids)
        values = first_values(ids, self.dim, self.seed, self.initializer)
        numbers = self.find(ids)
        values[numbers >= 0] = self.rows[numbers[numbers >= 0], : self.dim]
        return values

    def push(self, ids: Ids, grads: Grid, hyper: Doubles) -> None:
        """Change the row of each id once, by the sum of its gradients."""
        deduped = dedup(ids, 1)
        sums = sum_by(grads, deduped.inverse, len(deduped.ids))
        numbers = self.insert(deduped.ids)
        end = self.dim + self.state_width
        weights, state = self.rows[numbers, : self.dim], self.rows[numbers, self.dim : end]
        weights, state = update(self.rule, weights, state, sums, hyper)
        self.rows[numbers, : self.dim], self.rows[numbers, self.dim : end] = weights, state

    def find(self, ids: Ids) -> Int64s:
        """The row number of each id, -1 where there is none."""
        return np.array([self._number.get(one, -1) for one in ids.tolist()], np.int64)

    def insert(self, ids: Ids) -> Int64s:
        """The row number of each id; unknown ids get a row with their first values."""
        for one in ids.tolist():
            if one not in self._number:
                self._number[one] = self._new_row(one)
        return self.find(ids)

    def ids_of(self, numbers: Ids) -> Ids:
        """The ids of rows in use."""
        known = {number: one for one, number in self._number.items()}
        return np.array([known[number] for number in numbers.tolist()], np.int64)

    def remove(self, numbers: Ids) -> int:
        """Free rows for new ids; return how many of them were in use."""
        known = {number: one for one, number in self._number.items()}
        gone = [number for number in dict.fromkeys(numbers.tolist()) if number in known]
        for number in gone:
            del self._number[known[number]]
        self._freed += gone
        return len(gone)

    def load(self, ids: Ids, full_rows: Grid) -> None:
        """Set whole rows: weights, state and metadata."""
        for number, row in zip(self.insert(ids), full_rows, strict=True):
            self.rows[number] = row

    def _new_row(self, one: int) -> int:
        row = np.zeros(self.width, np.float32)
        ids = np.array([one], np.int64)
        row[: self.dim] = first_values(ids, self.dim, self.seed, self.initializer)[0]
        row[self.dim : self.dim + self.state_width] = self.rule.initial
        if not self._freed:
            self.rows = np.vstack([self.rows, row[None]])
            return len(self.rows) - 1
        number = self._freed.pop()
        self.rows[number] = row
        return number
