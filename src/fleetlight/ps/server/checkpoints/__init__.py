# SPDX-License-Identifier: Apache-2.0
"""A server's part in saving and loading a checkpoint."""
