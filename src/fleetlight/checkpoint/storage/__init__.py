# SPDX-License-Identifier: Apache-2.0
"""Generations, checksummed files and the manifest of a checkpoint."""
