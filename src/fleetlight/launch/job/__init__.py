# SPDX-License-Identifier: Apache-2.0
"""Flags become a `JobSpec`, and a `JobSpec` becomes the environment of each process.

Pure: no function here starts a process, opens a socket or waits.
"""
