# SPDX-License-Identifier: Apache-2.0
"""Exported programs that run without the model's class."""
