# SPDX-License-Identifier: Apache-2.0
"""The state of a server: rows of tables, and dense parameters with the user's own optimizer."""
