# SPDX-License-Identifier: Apache-2.0
"""The bytes of tensors, tables and Python values."""
