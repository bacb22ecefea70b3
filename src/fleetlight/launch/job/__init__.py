# SPDX-License-Identifier: Apache-2.0
"""Flags become a `JobSpec`, and a `JobSpec` becomes the environment of each process.

Pure: no function here starts a process, opens a socket or waits.

`job/` describes the job, pure: flags become `LaunchOptions`, with the resources of the machine
(`inventory.py`) a plan, and with the other machines a `JobLayout`, which determines the
environment of each process.
"""
