# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job as forks of one process that has loaded torch."""
