# SPDX-License-Identifier: Apache-2.0
"""Saving, loading, resuming and stopping a job."""
