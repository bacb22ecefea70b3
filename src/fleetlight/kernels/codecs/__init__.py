# SPDX-License-Identifier: Apache-2.0
"""Gradients in fewer bytes."""
