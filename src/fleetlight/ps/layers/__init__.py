# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that use tables: lookups, weights and gradients of rows.

`layers/` has the modules of a model: `embedding.py`, whose `weight` (`table_weight.py`) has no
elements and refuses operations, and `table_gradient.py`, the tensor in that weight's `.grad`. It
has the rows that backward reached, and all operations of torch on gradients work on it.
`grad_accumulation.py` sets it, since torch would load DTensor first. `lookup.py` has the lookups
of layers in main memory, by kernels. `device_rows.py` has those of layers on a GPU: the distinct
rows are a tensor there, torch gathers and pools them, and their gradients wait in an
`ArrivingGradients` until they are read. `caching/` keeps rows on the device between lookups:
`device_cache.py` has the rows, and knows which id is in which slot and which rows are outdated.
`staging.py` makes the copies, of dense parameters too: `CudaStaging` on side streams through
pinned memory. `collection/` looks up many features at once. `embedding_collection.py` has an
ordinary layer for each feature, and those of one table share a weight; so only the forward
differs. `feature_ids.py` reads the forms of a batch, and `joint_lookup.py` asks for all tables
together (`worker/joint_reads.py`), pools with one kernel (`kernels/ids/pooling.py`) and returns
one gradient for each table; `embedding_collection.py` does so on a GPU.
"""
