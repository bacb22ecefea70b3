# SPDX-License-Identifier: Apache-2.0
"""The format of published models: a manifest, files of rows, and dense values.

`publication` is the format of published models. `manifest.py` is `current.json` (a base and its
deltas in order; pure, it refuses gaps and stale epochs), `row_file.py` reads and writes Parquet,
and `lease.py` keeps a second publisher out without comparing clocks.
"""
