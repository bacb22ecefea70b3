# SPDX-License-Identifier: Apache-2.0
"""Operations of our own that stand in the graphs of programs.

`ops/` has Fleetlight's own operations: `marks.py` (gradients before the optimizer, and the twins
of training and evaluation), `reductions.py`, `norms.py` (batch norm over all workers) and
`rows.py`, whose bags `device_bags.py` pools on a GPU; `graph/lookups.py` has the operations of
tables.
"""
