# SPDX-License-Identifier: Apache-2.0
"""Batches of ids: hashing, dedup, gathering rows, bags, and the order of checkpoints."""
