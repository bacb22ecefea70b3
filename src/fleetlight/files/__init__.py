# SPDX-License-Identifier: Apache-2.0
"""Lock files, and files that are replaced as a whole."""
