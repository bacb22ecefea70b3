# SPDX-License-Identifier: Apache-2.0
"""Programs in files: a graph as JSON, its state as safetensors, no pickle."""
