# SPDX-License-Identifier: Apache-2.0
"""From flags to running processes.

`job` is what to run, `processes` runs it on one machine, `machines` lets several launchers run one
job; each room uses only those before it. A `backend` runs a `JobSpec`; the default one, `local`,
brings the three together. Nothing here imports torch unless several machines have to meet.
"""
