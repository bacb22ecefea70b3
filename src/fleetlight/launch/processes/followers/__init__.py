# SPDX-License-Identifier: Apache-2.0
"""Processes beside the job that read its log folder: the live page, the export of events."""
