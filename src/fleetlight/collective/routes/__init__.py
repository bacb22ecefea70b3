# SPDX-License-Identifier: Apache-2.0
"""The ways that tensors take to be summed over the workers."""
