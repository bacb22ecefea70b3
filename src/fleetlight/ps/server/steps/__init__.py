# SPDX-License-Identifier: Apache-2.0
"""Pushes: how they become steps, are applied once and counted."""
