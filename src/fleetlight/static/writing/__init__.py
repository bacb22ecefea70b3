# SPDX-License-Identifier: Apache-2.0
"""What is done with tensors without values becomes a graph."""
