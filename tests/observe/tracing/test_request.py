# SPDX-License-Identifier: Apache-2.0
"""Requests for traces, in a folder that may not be readable."""

from pathlib import Path

import pytest

from fleetlight.observe.tracing.request import TraceRequest, request, requested


def test_the_last_request_is_read(tmp_path: Path) -> None:
    assert requested(tmp_path) is None
    wanted = TraceRequest("a", steps=3)
    request(tmp_path, wanted)
    assert requested(tmp_path) == wanted


def test_a_damaged_request_is_none_and_a_folder_out_of_reach_an_error(tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "trace-request.json"
    file.parent.mkdir()
    file.write_text("{")
    assert requested(tmp_path) is None
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError, match="directory"):
        requested(tmp_path)
