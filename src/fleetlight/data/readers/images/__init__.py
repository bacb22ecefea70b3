# SPDX-License-Identifier: Apache-2.0
"""Data sets of images."""
