# SPDX-License-Identifier: Apache-2.0
"""The log and the snapshots of a server, and recovery from them."""
