# SPDX-License-Identifier: Apache-2.0
"""A connection to the store that may hang or fail."""

import threading

import pytest

from fleetlight.launch.machines.store_connection import StoreConnection, StoreLostError, bounded


def test_hanging_call_is_abandoned() -> None:
    release = threading.Event()
    with pytest.raises(StoreLostError, match=r"did not reply within 0.01 s"):
        bounded(release.wait, deadline_s=0.01)
    release.set()


def test_values_and_errors_pass_through() -> None:
    assert bounded(lambda: 3) == 3
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"])


def fail(raw: object) -> None:
    raise RuntimeError(f"{raw} failed")


def test_failed_connection_is_not_reused() -> None:
    link = StoreConnection("first", lambda: "second")
    assert link.call(str.upper) == "FIRST"
    with pytest.raises(RuntimeError, match="first failed"):
        link.call(fail)
    assert link.call(str.upper) == "SECOND"


def test_connection_within_this_process_is_never_replaced() -> None:
    link = StoreConnection("own")
    with pytest.raises(RuntimeError, match="own failed"):
        link.call(fail)
    assert link.raw == "own"
