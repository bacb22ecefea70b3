# SPDX-License-Identifier: Apache-2.0
"""The rules by which rows learn, one a file; each declares a `RULE`."""
