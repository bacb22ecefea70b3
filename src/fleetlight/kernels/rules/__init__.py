# SPDX-License-Identifier: Apache-2.0
"""The rules of tables, one file for each; every file declares a `RULE`."""
