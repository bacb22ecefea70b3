# SPDX-License-Identifier: Apache-2.0
"""Data sets in lines of text, one record each."""
