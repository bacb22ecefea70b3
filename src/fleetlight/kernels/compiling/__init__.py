# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled when first used, and kept on disk for the next process."""
