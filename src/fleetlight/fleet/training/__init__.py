# SPDX-License-Identifier: Apache-2.0
"""Registered models and optimizers, and their training features."""
