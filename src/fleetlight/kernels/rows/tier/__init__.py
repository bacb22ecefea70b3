# SPDX-License-Identifier: Apache-2.0
"""Tables whose frequent rows are in memory and whose other rows are in a file."""
