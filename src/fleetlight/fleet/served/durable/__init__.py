# SPDX-License-Identifier: Apache-2.0
"""Durability: restarted workers and servers resume where they were killed."""
