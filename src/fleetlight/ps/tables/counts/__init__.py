# SPDX-License-Identifier: Apache-2.0
"""What a table counts of each id, and which rows it decides by that."""
