# SPDX-License-Identifier: Apache-2.0
"""`retried`: repeats what may pass, says once why it waits, and ends at a deadline."""

import logging

import pytest

from fleetlight.errors import StoreError
from fleetlight.store import retries
from fleetlight.store.failures import Explanation
from fleetlight.store.retries import Limits, Passing, retried


def explained(error: BaseException) -> Explanation:
    raise AssertionError(error)


def test_an_operation_that_waits_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "_REPORT_AFTER_S", 0.0)

    def act(attempt: int) -> str:
        if attempt < 3:
            raise Passing("the endpoint refuses connections")
        return "done"

    with caplog.at_level(logging.WARNING):
        limits = Limits(first_pause_s=0.0)
        assert retried("s3://bucket", "list objects", limits, act, explained) == "done"
    [line] = caplog.messages
    assert line == (
        "s3://bucket: could not list objects yet, trying for up to 300 s: the endpoint refuses "
        "connections"
    )


def test_an_operation_that_soon_succeeds_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def act(attempt: int) -> int:
        if not attempt:
            raise Passing("the server is busy")
        return attempt

    assert retried("s3://bucket", "get a", Limits(first_pause_s=0.0), act, explained) == 1
    assert not caplog.messages


def test_a_failure_that_does_not_pass_ends_at_the_deadline() -> None:
    def act(attempt: int) -> None:
        raise Passing("the server is busy")

    limits = Limits(deadline_s=0.0)
    with pytest.raises(StoreError, match=r"could not get a within 0 s \(1 attempts\)"):
        retried("s3://bucket", "get a", limits, act, explained)
