# SPDX-License-Identifier: Apache-2.0
"""A connection that may hang or fail."""

from __future__ import annotations

import threading

import pytest

from fleetlight.launch.machines.store_connection import StoreConnection, StoreLostError, bounded


def test_what_hangs_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(StoreLostError, match=r"did not reply within 0.01 s"):
        bounded(release.wait, deadline_s=0.01)
    release.set()


def test_values_and_errors_come_through() -> None:
    assert bounded(lambda: 3) == 3
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"])


def fail(raw: object) -> None:
    raise RuntimeError(f"{raw} failed")


def test_a_connection_that_failed_is_not_used_again() -> None:
    link = StoreConnection("first", lambda: "second")
    assert link.call(str.upper) == "FIRST"
    with pytest.raises(RuntimeError, match="first failed"):
        link.call(fail)
    assert link.call(str.upper) == "SECOND"


def test_a_connection_within_this_process_is_never_replaced() -> None:
    link = StoreConnection("own")
    with pytest.raises(RuntimeError, match="own failed"):
        link.call(fail)
    assert link.raw == "own"
