# SPDX-License-Identifier: Apache-2.0
"""Start, supervise and end the processes of one machine, without leaving any behind.

`processes/` runs the job on one machine. `watch.py` decides what happens next (pure), and
`supervise.py` does it. A process reports to its launcher by a `ProcessStatus` in a file
(`status.py`); `fleet/exit/exit_status.py` writes it. Each child leads a process group; a
`Reaper`, a tiny process, kills those groups when fleetrun itself is killed. `failure.py` finds
the failure that caused the others; `remedy.py` says what to do about it. `output/` has what
processes print: worker 0's terminal, the tracebacks that `held.py` holds back until the cause is
known; `failure.py` finds the culprit's in its log. `record.py` keeps a file in the log folder
with the processes of this launcher; `process_identity.py` tells a process from a later one with
its number, and sends signals only to the one that is meant. `exit_codes.py` is the contract of
exit codes, and `failure_reason.py` writes the reason of a failure where engines look; a failing
process uses both (`fleet/exit/exit_status.py`). `member.py` runs one process that an engine
starts (`fleetlight member`), by the parts of `processes/`.
"""
