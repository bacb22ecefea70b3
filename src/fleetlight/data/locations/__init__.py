# SPDX-License-Identifier: Apache-2.0
"""Files on this machine and in buckets: found by names and patterns, read in ranges."""
