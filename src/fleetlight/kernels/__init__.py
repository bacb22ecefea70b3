# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of sparse training: tables of rows by id, and batches of ids.

Numba compiles each kernel when it is first used. `twins` has the kernels in readable NumPy.
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
