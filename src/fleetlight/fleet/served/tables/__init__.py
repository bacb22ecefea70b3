# SPDX-License-Identifier: Apache-2.0
"""The tables of servers in checkpoints, exports and state dicts."""
