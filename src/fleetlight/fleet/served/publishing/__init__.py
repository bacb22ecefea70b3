# SPDX-License-Identifier: Apache-2.0
"""Publishes the rows and dense values of a job with servers."""
