# SPDX-License-Identifier: Apache-2.0
"""From flags to running processes.

`job` is what to run, `processes` runs it on one machine, `machines` lets several launchers run one
job, and `session` brings the three together; each uses only those before it. A module of `backends`
runs a `JobSpec`: `processes` and `hosts` by a session, an engine by its own means.
Nothing here imports torch unless several machines have to meet.
"""
