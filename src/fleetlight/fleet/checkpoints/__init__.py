# SPDX-License-Identifier: Apache-2.0
"""Saving, loading, resuming and stopping a job.

A job with a folder saves automatically (`fleet/checkpoints/autosave.py`). SIGTERM sets a flag,
and all workers act on it at one place, between two batches of a loader that trains. A
`StopAgreement` (`stop_agreement.py`) finds that place. In collective jobs workers poll each other
at places that all count alike (`PollSchedule`, pure). With servers, replies to steps and
heartbeats bring the request (`ControlSignal`). In sync mode all workers of a step receive it
together, otherwise each worker on its own. A worker that waits for a stopped one gets a
`StoppedError`. `resumption.py` loads a checkpoint in parts, each when the script needs it.
"""
