# SPDX-License-Identifier: Apache-2.0
"""The status file by which processes report to their launcher."""

import pathlib
import time

import pytest

from fleetlight.launch.status import (
    UNKNOWN,
    ProcessStatus,
    Stop,
    clear_saves_at_sigterm,
    read,
    write,
)


def test_status_round_trips(tmp_path: pathlib.Path) -> None:
    file = str(tmp_path / "worker.0")
    for status in (
        ProcessStatus(error="ValueError: x", permanent=True, saves_at_sigterm=True),
        ProcessStatus(exiting=True, stopped=Stop(7, "/c")),
    ):
        before = time.monotonic()
        write(file, status)
        found = read(file)
        assert found.at is not None
        assert before <= found.at <= time.monotonic()
        assert ProcessStatus(at=found.at) != found
        assert (found.error, found.permanent, found.stopped) == (
            status.error,
            status.permanent,
            status.stopped,
        )
    assert [one.name for one in tmp_path.iterdir()] == ["worker.0"]


@pytest.mark.parametrize(
    "text", ["", "not json", "[]", '{"error": 3}', '{"stopped": {"step": "x", "folder": "c"}}']
)
def test_unreadable_file_is_an_unknown_status(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "w").write_text(text)
    assert read(str(tmp_path / "w")) is UNKNOWN
    assert read(str(tmp_path / "none")) is UNKNOWN


def test_new_process_has_not_reported_that_it_saves(tmp_path: pathlib.Path) -> None:
    file = str(tmp_path / "w")
    clear_saves_at_sigterm(file)
    assert read(file) is UNKNOWN
    write(file, ProcessStatus(restartable=True, saves_at_sigterm=True))
    clear_saves_at_sigterm(file)
    found = read(file)
    assert (found.restartable, found.saves_at_sigterm) == (True, False)
