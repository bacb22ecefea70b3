# SPDX-License-Identifier: Apache-2.0
"""Tables of rows by id, and what workers do with batches of ids: the arithmetic of sparse training.

Compiled by numba when first used; `twins` holds the same in plain NumPy, slow and readable.
"""

from fleetlight.kernels.aside import lay_aside, read_as_they_were
from fleetlight.kernels.bags import gather_bags, spread_bags, weight_grads
from fleetlight.kernels.blocks import add_blocks, block_count, to_blocks
from fleetlight.kernels.bucket_order import BucketCount, put_in_bucket_order
from fleetlight.kernels.checksums import checksum
from fleetlight.kernels.dedup import Deduped, dedup, member
from fleetlight.kernels.finite import all_finite
from fleetlight.kernels.first_values import Initializer, first_values, table_seed
from fleetlight.kernels.gathering import gather, gather_visited, sum_by, sum_visited
from fleetlight.kernels.hashing import BUCKETS, buckets, servers_of, splitmix64
from fleetlight.kernels.largest import add_at, largest, take_out
from fleetlight.kernels.row_access import copy_rows
from fleetlight.kernels.rows.rule import Rule
from fleetlight.kernels.rows.updates import RULES, rule_named
from fleetlight.kernels.sweeping import Batch, Untaken
from fleetlight.kernels.table import RowTable

__all__ = [
    "BUCKETS",
    "RULES",
    "Batch",
    "BucketCount",
    "Deduped",
    "Initializer",
    "RowTable",
    "Rule",
    "Untaken",
    "add_at",
    "add_blocks",
    "all_finite",
    "block_count",
    "buckets",
    "checksum",
    "copy_rows",
    "dedup",
    "first_values",
    "gather",
    "gather_bags",
    "gather_visited",
    "largest",
    "lay_aside",
    "member",
    "put_in_bucket_order",
    "read_as_they_were",
    "rule_named",
    "servers_of",
    "splitmix64",
    "spread_bags",
    "sum_by",
    "sum_visited",
    "table_seed",
    "take_out",
    "to_blocks",
    "weight_grads",
]
