# SPDX-License-Identifier: Apache-2.0
"""Turn flags into running processes.

`job` describes what to run, `processes` runs it on one machine, `machines` connects the launchers
of several machines, and `session` combines the three; each imports only the ones before it.
Each module of `backends` runs a `JobSpec`: `processes` and `hosts` through a session.
torch is imported only for jobs of several machines.

`launch` turns flags into a `JobSpec` (roles, counts, resources, command, environment: pure data)
and hands it to a backend.
"""
