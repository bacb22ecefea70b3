# SPDX-License-Identifier: Apache-2.0
"""Metrics of groups of records, such as the results of a query: NDCG and grouped AUC.

The records of a group may be on several workers. Each group has an owner, which the hash of its id
determines, and the owner receives all its records. Workers send their records in rounds of bounded
size, and an owner keeps those of its groups. So a worker stores a share of all records, never all.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import DataError, MembershipError
from fleetlight.kernels.ids.hashing import mix
from fleetlight.observe.evaluation import (
    Gather,
    Reduce,
    as_array,
    is_positive,
    on_all_workers,
    scores_and_labels,
)
from fleetlight.observe.log import logger

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
#: structured, with the fields of `_RECORD`
Records = NDArray[Any]

_RECORD = np.dtype([("group", np.int64), ("score", np.float64), ("label", np.float64)])
#: what all workers together send in a round
ROUND_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class GroupedMetric:
    """A mean over groups."""

    #: NaN if no group counts
    value: float
    #: how many groups count
    groups: int
    #: how many groups do not: their metric is not defined
    skipped: int


def ndcg(
    scores: object,
    labels: object,
    groups: object,
    k: int | None,
    reduce: Reduce,
    gather: Gather,
    index: int,
) -> GroupedMetric:
    """Mean NDCG of the k records of each group with the highest scores; None for all records.

    A label is a gain, 0 or more. Records with equal scores share the mean of their gains. Groups
    without a label above 0 are skipped. `index` is the number of this worker.
    """
    records = on_all_workers(lambda: _ndcg_records(scores, labels, groups), reduce)
    records, workers = _own_groups(records, gather, index)
    gained, ideal = _gains(records, math.inf if k is None else k)
    counted = ideal > 0
    values = gained[counted] / ideal[counted]
    return _mean("ndcg", values, np.ones(values.size), ideal.size, workers, reduce)


def gauc(
    scores: object, labels: object, groups: object, reduce: Reduce, gather: Gather, index: int
) -> GroupedMetric:
    """Mean AUC of the groups, weighted with their numbers of records; ties count as half.

    Groups of one class are skipped. `index` is the number of this worker.
    """
    records = on_all_workers(lambda: _gauc_records(scores, labels, groups), reduce)
    records, workers = _own_groups(records, gather, index)
    ordered, positives, negatives = _ordered_pairs(records)
    pairs = positives * negatives
    counted = pairs > 0
    values, weights = ordered[counted] / pairs[counted], (positives + negatives)[counted]
    return _mean("gauc", values, weights, pairs.size, workers, reduce)


def _ndcg_records(scores: object, labels: object, groups: object) -> Records:
    values, truths = scores_and_labels("ndcg", scores, labels)
    if np.any(wrong := ~((truths >= 0) & (truths < math.inf))):
        raise DataError(f"ndcg: got the label {truths[wrong][0]}, expected a gain of at least 0")
    return _records("ndcg", values, truths, groups)


def _gauc_records(scores: object, labels: object, groups: object) -> Records:
    values, truths = scores_and_labels("gauc", scores, labels)
    return _records("gauc", values, is_positive("gauc", truths), groups)


def _records(name: str, values: Floats, truths: NDArray[Any], groups: object) -> Records:
    ids = _ids(name, groups)
    if ids.size != values.size:
        raise DataError(
            f"{name}: got {ids.size} group ids for {values.size} scores, expected one each"
        )
    records = np.empty(ids.size, _RECORD)
    records["group"], records["score"], records["label"] = ids, values, truths
    return records


def _ids(name: str, groups: object) -> Places:
    try:
        ids = as_array(groups).ravel()
        if ids.size and ids.dtype.kind == "f":
            raise DataError("got floats, expected whole numbers")
    except DataError as error:
        raise DataError(
            f"{name}: group ids: {error}; fleetlight.data.stable_hash makes ids of texts"
        ) from error
    return ids.astype(np.int64)


def _own_groups(records: Records, gather: Gather, index: int) -> tuple[Records, int]:
    """All records of the groups that this worker owns, and the number of workers."""
    # without lost workers
    members = np.stack(gather(np.array([index, records.size], np.int64)))
    workers, place = len(members), np.flatnonzero(members[:, 0] == index)[0]
    is_own = _owners(records, workers) == place
    own, sent = [records[is_own]], records[~is_own]
    part = max(1, ROUND_BYTES // (_RECORD.itemsize * workers))
    for start in range(0, members[:, 1].max(), part):
        arrived = np.concatenate(gather(sent[start : start + part]))
        own.append(arrived[_owners(arrived, workers) == place])
    return np.concatenate(own), workers


def _owners(records: Records, workers: int) -> NDArray[np.uint64]:
    owners: NDArray[np.uint64] = mix(records["group"].astype(np.uint64)) % np.uint64(workers)
    return owners


def _gains(records: Records, k: float) -> tuple[Floats, Floats]:
    """For each group: the discounted gains in the order of scores, and in the best order."""
    # labels are the last key, so that sums do not depend on the order of records
    records = records[np.lexsort((records["label"], -records["score"], records["group"]))]
    groups, ties = _starts(records, "group"), _starts(records, "group", "score")
    rank = np.arange(records.size) - np.repeat(groups, _sizes(groups, records.size))
    discounts = np.where(rank < k, 1 / np.log2(rank + 2), 0.0)
    gains = np.add.reduceat(records["label"], ties) / _sizes(ties, records.size)
    gained = np.add.reduceat(
        gains * np.add.reduceat(discounts, ties), np.searchsorted(ties, groups)
    )
    best = records["label"][np.lexsort((-records["label"], records["group"]))]
    return gained, np.add.reduceat(best * discounts, groups)


def _ordered_pairs(records: Records) -> tuple[Floats, Floats, Floats]:
    """For each group: pairs of both classes in the right order, positives and negatives."""
    records = records[np.lexsort((records["score"], records["group"]))]
    groups, ties = _starts(records, "group"), _starts(records, "group", "score")
    first_ties = np.searchsorted(ties, groups)
    positives = np.add.reduceat(records["label"], ties)
    negatives = _sizes(ties, records.size) - positives
    lower = np.cumsum(negatives) - negatives
    lower -= np.repeat(lower[first_ties], _sizes(first_ties, ties.size))
    ordered = np.add.reduceat(positives * (lower + negatives / 2), first_ties)
    return (
        ordered,
        np.add.reduceat(positives, first_ties),
        np.add.reduceat(negatives, first_ties),
    )


def _starts(records: Records, *fields: str) -> Places:
    """Where a run of records begins that are equal in the fields."""
    begins = np.zeros(records.size, np.bool_)
    begins[:1] = True
    for field in fields:
        begins[1:] |= records[field][1:] != records[field][:-1]
    return np.flatnonzero(begins)


def _sizes(starts: Places, end: int) -> Places:
    return np.diff(starts, append=end)


def _mean(
    name: str, values: Floats, weights: Floats, groups: int, workers: int, reduce: Reduce
) -> GroupedMetric:
    """The mean over the groups of all owners; `groups` includes those without a value."""
    sums = np.array([values @ weights, weights.sum(), values.size, groups - values.size, 1.0])
    total, weight, counted, skipped, present = reduce(sums, "sum").tolist()
    if present != workers:
        raise MembershipError(
            f"{name}: got the groups of {present:g} workers, expected {workers}: a worker was lost "
            "meanwhile, with the records that it had received; compute the metric again"
        )
    if not counted:
        why = {"ndcg": "a label above 0", "gauc": "records of both classes"}[name]
        logger.warning("%s: no group on any worker has %s; the result is nan", name, why)
    value = total / weight if counted else math.nan
    return GroupedMetric(value, int(counted), int(skipped))
