# SPDX-License-Identifier: Apache-2.0
"""Rows as they were at one moment, while others change them."""
