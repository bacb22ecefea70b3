# SPDX-License-Identifier: Apache-2.0
"""Handles the messages of workers: state machines decide, and `PresenceMonitor` waits."""
