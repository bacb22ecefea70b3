# SPDX-License-Identifier: Apache-2.0
"""The commands `fleetrun` and `fleetlight`.

`cli` parses, prints, exits (`python -m fleetlight` is its `fleetlight`). `flag_values.py` reads
the text of each flag; `terminal/` has the screen of `fleetrun`, coloured tables, logs that are
followed; `watch/` has the commands that show a running job: the page, `fleetlight top` and
traces; `stored/` has the commands about what jobs have stored, without torch: `checkpoints.py` by
`checkpoint/storage/maintenance.py`, `tables.py` by `table_stats.py` there; `job_file.py` hands
the values of a job file to the same readers.
"""
