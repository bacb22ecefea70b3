# SPDX-License-Identifier: Apache-2.0
"""The kind of `RowTable` that a plan asks for: with all rows in memory, or with a file.

All kinds have the same rows and metadata, so a table does not depend on its kind.
"""

from __future__ import annotations

from pathlib import Path

from fleetlight.kernels import (
    Initializer,
    NarrowRowTable,
    RowTable,
    Rule,
    TieredNarrowRowTable,
    TieredRowTable,
)
from fleetlight.ps.plan import BF16, FP32, TablePlan
from fleetlight.ps.tables.counts import admission
from fleetlight.ps.tables.tier.row_log import RowLog

#: by dtype of the plan
_KINDS = {FP32: RowTable, BF16: NarrowRowTable}
_TIERED_KINDS = {FP32: TieredRowTable, BF16: TieredNarrowRowTable}


def rows_of(plan: TablePlan, rule: Rule, seed: int, count: int, folder: Path) -> RowTable:
    """An empty table for about `count` rows; `folder`: for rows that are not in memory."""
    of_rows = plan.dim, rule, seed, _initializer(plan), admission.meta_width(plan), count
    if not plan.memory:
        return _KINDS[plan.dtype](*of_rows)
    kind = _TIERED_KINDS[plan.dtype]
    width = kind.stored_width(plan.dim, rule)
    store = RowLog(folder, plan.name, width + 1)
    return kind(*of_rows, slots=kind.slots_in(plan.memory, width), store=store)


def _initializer(plan: TablePlan) -> Initializer:
    how = plan.initializer
    return Initializer(how.kind, how.a, how.b)  # type: ignore[arg-type]  # it checks the kind
