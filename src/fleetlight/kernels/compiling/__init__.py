# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels when they are first used, and caches the code on disk."""
