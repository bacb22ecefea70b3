# SPDX-License-Identifier: Apache-2.0
"""The job of workers that reduce gradients among themselves."""
