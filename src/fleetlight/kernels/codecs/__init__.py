# SPDX-License-Identifier: Apache-2.0
"""Kernels that encode gradients in fewer bytes."""
