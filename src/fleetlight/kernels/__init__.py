# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of sparse training: tables of rows by id, and batches of ids.

Numba compiles each kernel when it is first used.

`kernels` is the arithmetic of sparse training, on arrays only. `rows/` is the table: `table.py`
(`RowTable`: id -> row [weights | state | meta]), `index.py` and `probing.py` (where an id is
found), `slab.py` (where rows are stored), `narrow_table.py` (weights in bfloat16), `copies.py` (a
worker's copies of rows on servers). `rows/tier/` is a table with few rows in memory:
`tiered_table.py` (`TieredRowTable`, a `RowTable` whose kernels work on slots) brings the rows of
each call into slots, `slots.py` and `residency.py` know where each row is and which rows leave.
The file behind it is a `RowStore`, a protocol, since kernels open no files. A `Rule` (`rule.py`)
updates a row. Each rule is one file in `rules/`; `rows/updates.py` finds and compiles it. `ids/`
has batches of ids: `dedup.py` (distinct ids, grouped by the server that owns them),
`gathering.py`, `bags.py`, `pooling.py` (bags of many features). `layered_rows.py` looks ids up in
two layers, for services. `copy_on_write/` keeps the rows of a snapshot while training changes
them, and marks rows that changed; `codecs/` encodes gradients and rows in fewer bytes, and
`checksums.py` detects damage, `differences.py` has what own steps add to shared dense values.
Most kernels have a readable twin in NumPy, the oracle of their tests: `twin_table.py` and
`codecs/twin_codecs.py`. `compiling/` compiles each kernel when it is first used, in one process
at a time (`kernel.py`), into a writable folder (`compiled_files.py`). Other processes load the
code without waiting and without starting numba's compiler (`loading.py`).
"""

from fleetlight.kernels.checksums import checksum
from fleetlight.kernels.codecs.blocks import add_blocks, block_count, to_blocks
from fleetlight.kernels.codecs.magnitudes import add_at, all_finite, largest, take_out
from fleetlight.kernels.codecs.narrow_rows import (
    from_bfloat16,
    from_int8,
    to_bfloat16,
    to_float16,
    to_int8,
)
from fleetlight.kernels.copy_on_write.changed_rows import (
    ChangedRows,
    are_marked,
    count_marks,
    marks_between,
    marks_from,
)
from fleetlight.kernels.copy_on_write.copied_rows import lay_aside, read_as_they_were
from fleetlight.kernels.copy_on_write.pending_rows import Batch, PendingRows
from fleetlight.kernels.differences import difference, rebase
from fleetlight.kernels.ids.bags import gather_bags, spread_bags, weight_grads
from fleetlight.kernels.ids.bucket_order import BucketCount, put_in_bucket_order
from fleetlight.kernels.ids.dedup import Deduped, dedup, member
from fleetlight.kernels.ids.gathering import gather, gather_visited, sum_by, sum_visited
from fleetlight.kernels.ids.hashing import BUCKETS, buckets, servers_of, splitmix64
from fleetlight.kernels.rows.first_values import Initializer, first_values, table_seed
from fleetlight.kernels.rows.narrow_table import NarrowRowTable
from fleetlight.kernels.rows.row_access import copy_rows
from fleetlight.kernels.rows.table import RowTable
from fleetlight.kernels.rows.tier.tiered_table import (
    RowStore,
    TieredNarrowRowTable,
    TieredRowTable,
)
from fleetlight.kernels.rows.updates import RULES, rule_named
from fleetlight.kernels.rule import Rule

__all__ = [
    "BUCKETS",
    "RULES",
    "Batch",
    "BucketCount",
    "ChangedRows",
    "Deduped",
    "Initializer",
    "NarrowRowTable",
    "PendingRows",
    "RowStore",
    "RowTable",
    "Rule",
    "TieredNarrowRowTable",
    "TieredRowTable",
    "add_at",
    "add_blocks",
    "all_finite",
    "are_marked",
    "block_count",
    "buckets",
    "checksum",
    "copy_rows",
    "count_marks",
    "dedup",
    "difference",
    "first_values",
    "from_bfloat16",
    "from_int8",
    "gather",
    "gather_bags",
    "gather_visited",
    "largest",
    "lay_aside",
    "marks_between",
    "marks_from",
    "member",
    "put_in_bucket_order",
    "read_as_they_were",
    "rebase",
    "rule_named",
    "servers_of",
    "splitmix64",
    "spread_bags",
    "sum_by",
    "sum_visited",
    "table_seed",
    "take_out",
    "to_bfloat16",
    "to_blocks",
    "to_float16",
    "to_int8",
    "weight_grads",
]
