# SPDX-License-Identifier: Apache-2.0
"""The plan of a job: which tables and dense parameters its servers store."""
