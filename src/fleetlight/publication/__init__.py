# SPDX-License-Identifier: Apache-2.0
"""The format of published models: a manifest, files of rows, and dense values."""
