# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: tables and dense parameters of a model, kept by processes of their own."""
