# SPDX-License-Identifier: Apache-2.0
"""What outlives a server: its log, its snapshots, and recovery from them."""
