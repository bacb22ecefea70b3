# SPDX-License-Identifier: Apache-2.0
"""Metrics, which processes count: names and units, and the snapshots that others read."""
