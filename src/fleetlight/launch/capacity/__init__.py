# SPDX-License-Identifier: Apache-2.0
"""Predict the speed, traffic and memory of a job with parameter servers of any size."""
