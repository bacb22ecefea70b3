# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of announced batches before the script asks for them."""
