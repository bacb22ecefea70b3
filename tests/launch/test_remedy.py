# SPDX-License-Identifier: Apache-2.0
"""What a user is told to do after a failure."""

import dataclasses

import pytest

from fleetlight.launch.processes.failure import JobFailure
from fleetlight.launch.remedy import remedy

FAILURE = JobFailure(what="worker 1 of 2 exited with code 1", code=1, error="E: x", log="log/w.1")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "correct the script or its data, then start the job again"),
        ({"traceback": "Traceback"}, "or its data where the traceback ends"),
        ({"error": "", "code": 3}, "the script exited with this code itself"),
        ({"code": 78, "may_restart": False}, "a restart fails in the same way"),
        ({"code": 69, "consequence": True}, "no process has failed on its own"),
        ({"code": 137, "killed": True, "error": ""}, "look for out of memory in dmesg"),
        ({"code": 139, "killed": True}, "the log has the stacks of its threads"),
        ({"stopped": True}, ""),
        ({"interrupted": True}, ""),
        # a lost machine has no log
        ({"log": ""}, ""),
    ],
)
def test_sentence_fits_the_failure(changes: dict[str, object], sentence: str) -> None:
    text = remedy(dataclasses.replace(FAILURE, **changes), "log", None)  # type: ignore[arg-type]
    assert sentence in text
    assert bool(text) == bool(sentence)


def test_job_with_checkpoints_can_resume() -> None:
    assert remedy(FAILURE, "log", "/ckpt").endswith("continues from the last save in /ckpt")
    permanent = dataclasses.replace(FAILURE, code=78, may_restart=False)
    assert "/ckpt" not in remedy(permanent, "log", "/ckpt")
