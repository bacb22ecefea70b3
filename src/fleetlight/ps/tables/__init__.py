# SPDX-License-Identifier: Apache-2.0
"""What a server holds: rows of tables, and dense parameters under the user's own optimizer."""
