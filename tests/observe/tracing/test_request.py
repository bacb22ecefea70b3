# SPDX-License-Identifier: Apache-2.0
"""Requests for traces, in a folder that may not be readable."""

from __future__ import annotations

from pathlib import Path

from fleetlight.observe.tracing.request import TraceRequest, request, requested


def test_the_last_request_is_read(tmp_path: Path) -> None:
    assert requested(tmp_path) is None
    wanted = TraceRequest("a", steps=3)
    request(tmp_path, wanted)
    assert requested(tmp_path) == wanted


def test_a_request_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "figures" / "trace-request.json").mkdir(parents=True)
    assert requested(tmp_path) is None
