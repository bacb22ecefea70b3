# SPDX-License-Identifier: Apache-2.0
"""The write-ahead log of a server: its files, and the folder that has them.

`journal/` has the files of the log, and does not depend on servers: `records.py` (the format of
changes, pure), `segment.py` (a file that grows record by record), `journal.py` (many commits, one
write), `disk_full_retry.py` (retries while a disk is full), `fsync_marker.py` (how much of the
newest file is certainly on disk), `history.py` (reads the log back; it cuts a torn end off, and
damage is an error), `folder.py` (the owner of the folder), `locked_dir.py` (one process at a
time).
"""
