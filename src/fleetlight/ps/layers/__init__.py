# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that use tables: lookups, weights and gradients of rows."""
