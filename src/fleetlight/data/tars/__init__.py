# SPDX-License-Identifier: Apache-2.0
"""Tar files of samples, as WebDataset writes them."""
