# SPDX-License-Identifier: Apache-2.0
"""What a process counts: names and units, and the snapshots that others read."""
