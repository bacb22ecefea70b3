# SPDX-License-Identifier: Apache-2.0
"""Processes beside the job that read its log folder: the live page, the export of events.

`processes/followers/` has processes beside the job that only read its log folder: the page, and
the export of events (`event_export.py`), so that the launcher imports nothing of them, and no
collector can hold it up.
"""
