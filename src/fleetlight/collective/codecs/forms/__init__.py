# SPDX-License-Identifier: Apache-2.0
"""One codec a file, found by its file name."""
