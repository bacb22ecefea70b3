# SPDX-License-Identifier: Apache-2.0
"""Small tables and their contents."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from fleetlight.kernels import BUCKETS
from fleetlight.ps.plan import EntryPlan, InitializerPlan, RulePlan, TablePlan
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Floats, Ids

LR = {"lr": 0.5}
ALL = range(BUCKETS)


def table_plan(
    rule: RulePlan | str = "sgd",
    dim: int = 3,
    entry: EntryPlan | None = None,
    name: str = "emb",
    **more: Any,
) -> TablePlan:
    """A plan of one table, whose first values are between -1 and 1."""
    if isinstance(rule, str):
        rule = RulePlan(rule, {})
    return TablePlan(name, dim, rule, InitializerPlan("uniform", -1.0, 1.0), 0, 0, entry, **more)


def make(rule: RulePlan | str = "sgd", geo: bool = False, **rest: Any) -> Table:
    """A table with the plan of `table_plan`."""
    return Table(table_plan(rule, **rest), seed=7, geo=geo)


def ids_of(*ids: int) -> Ids:
    """Ids as an array."""
    return np.array(ids, np.int64)


def some_ids(count: int, seed: int = 0) -> Ids:
    """Distinct ids from the whole range of int64."""
    info = np.iinfo(np.int64)
    random = np.random.default_rng(seed)
    return np.unique(random.integers(info.min, info.max, count, np.int64))


def ones(count: int, dim: int = 3, value: float = 1.0) -> Floats:
    """Gradients whose elements are all equal."""
    return np.full((count, dim), value, np.float32)


def read(table: Table, ids: Ids) -> Floats:
    """Read rows without inserting any."""
    return table.pull(ids, insert=False)


def saved(table: Table, folder: Path, name: str = "t.safetensors") -> dict[str, Any]:
    """Cut and save a table; return the tensors of its file."""
    folder.mkdir(exist_ok=True)
    entry = table.save(table.cut(), 4, folder, name)
    path = folder / name
    assert (entry.table, entry.name, entry.bytes) == (4, name, path.stat().st_size)
    assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    tensors = safetensors.numpy.load_file(path)
    assert entry.rows == len(tensors["ids"])
    return tensors


def by_id(tensors: Sequence[dict[str, Any]]) -> dict[int, bytes]:
    """The bytes of all columns of each id."""
    return {
        int(i): b"".join(part[name][at].tobytes() for name in sorted(part) if name != "buckets")
        for part in tensors
        for at, i in enumerate(part["ids"])
    }
