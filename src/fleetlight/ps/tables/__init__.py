# SPDX-License-Identifier: Apache-2.0
"""The state of a server: rows of tables, and dense parameters with the user's own optimizer.

`tables/` is the state of a server (`server_state.py`): `table.py` (a `RowTable`, what it counts
of each id, and a snapshot during a save), `counts/` (`admission.py`: which ids get a row that
learns; `eviction.py`: which rows leave a table with a maximum), the snapshots
(`ordered_snapshot.py` for checkpoints, `unordered_snapshot.py` for recovery of the same server),
`table_lock.py` (the lock of a table, where a piece of a save comes before later pushes),
`saving/` (what changed since a base), `tier/` (the kind of row table that a plan asks for;
`row_log.py`: the file of rows that are not in memory, in segments), `dense.py` (the user's own
optimizer class over pieces of parameters), `optimizers.py` (the rule that replaces an optimizer
of torch in a table).
"""
