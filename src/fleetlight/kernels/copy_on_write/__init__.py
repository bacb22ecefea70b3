# SPDX-License-Identifier: Apache-2.0
"""Snapshots of rows by copy-on-write."""
