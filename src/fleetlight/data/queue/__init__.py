# SPDX-License-Identifier: Apache-2.0
"""Loaders whose records come from a shard queue, range by range."""
