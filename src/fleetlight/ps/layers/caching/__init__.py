# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that stay on the device of a layer between lookups."""
