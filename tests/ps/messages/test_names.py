# SPDX-License-Identifier: Apache-2.0
"""The names of fields on the wire and in files: those that earlier versions write and read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.ps.serving import hello, plan

from fleetlight.checkpoint.storage.manifest import HighWaterEntry
from fleetlight.ps import messages as m
from fleetlight.ps.changes import Baseline, WorkerJoined, WorkerLeft
from fleetlight.ps.journal.folder import FolderIdentity
from fleetlight.ps.worker.replay.commit_log import Commit, ResumePoint
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (hello(1, "control"), {"incarnation": 1, "life": 1}),
        (m.Welcome(0, 0, 3), {"life": 3}),
        (WorkerJoined(1, 5, 3), {"incarnation": 5, "life": 3}),
        (WorkerLeft(1, 5), {"incarnation": 5}),
        (FolderIdentity(0, 2, "job", plan()), {"life": 1}),
        (WorkerIdentity(1, 2, 2, "job", 0, 5, 3), {"incarnation": 5, "life": 3}),
        (HighWaterEntry(1, 5, 0, 9), {"incarnation": 5}),
        (ResumePoint(7, 0, 0, b""), {"answers": 7}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_renamed_field_keeps_its_name_outside_the_process(
    value: Any, names: dict[str, int]
) -> None:
    written = msgspec.json.decode(msgspec.json.encode(value))
    assert {name: written[name] for name in names} == names


def test_a_commit_keeps_the_name_of_its_resume_point() -> None:
    fields = {field.name: field.encode_name for field in msgspec.structs.fields(Commit)}
    assert fields["resume_point"] == "moment"


def test_a_snapshot_keeps_the_name_of_the_workers_that_joined() -> None:
    fields = {field.name: field.encode_name for field in msgspec.structs.fields(Baseline)}
    assert fields["arrivals"] == "lives"
