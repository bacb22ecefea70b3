# SPDX-License-Identifier: Apache-2.0
"""Gradients in buckets, and the one reducer that sums them over the workers."""
