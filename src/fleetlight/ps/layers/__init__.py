# SPDX-License-Identifier: Apache-2.0
"""What a model sees of its tables: layers, lookups, gradients of rows."""
