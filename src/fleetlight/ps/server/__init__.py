# SPDX-License-Identifier: Apache-2.0
"""Handles the messages of workers: pure state machines decide, and one place waits."""
