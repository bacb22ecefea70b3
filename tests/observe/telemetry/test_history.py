# SPDX-License-Identifier: Apache-2.0
"""The growth and the rates of metrics over time."""

import errno
import math
import os
from pathlib import Path

import pytest

from fleetlight.observe.telemetry.history import History, Series
from fleetlight.observe.telemetry.snapshot import Snapshot


def series(*moments: tuple[float, int, dict[str, float]]) -> Series:
    """A process by its moments: the time, the process id and the metrics."""
    made = Series()
    for at, pid, values in moments:
        made.add(Snapshot(at, pid, values))
    return made


def test_a_rate_is_that_of_the_last_seconds() -> None:
    one = series(*((float(at), 1, {"steps": at**2}) for at in range(11)))
    assert one.window(4.0) == (6, 10)
    assert one.rate("steps", 4.0) == (100 - 36) / 4
    assert one.rate("steps", math.inf) == 10.0
    assert one.rate("samples", 4.0) is None


def test_a_rate_may_be_negative() -> None:
    assert series((0.0, 1, {"rows": 9}), (2.0, 1, {"rows": 5})).rate("rows", 10.0) == -2.0


def test_moments_that_are_far_apart_give_a_rate() -> None:
    one = series((0.0, 1, {"steps": 0}), (100.0, 1, {"steps": 50}), (200.0, 1, {"steps": 150}))
    assert one.window(10.0) == (1, 2)
    assert one.rate("steps", 10.0) == 1.0


def test_one_moment_gives_no_rate() -> None:
    assert Series().rate("steps", 10.0) is None
    one = series((5.0, 1, {"steps": 3}))
    assert one.window(10.0) == (0, 0)
    assert one.rate("steps", 10.0) is None


def test_a_restarted_process_counts_from_zero() -> None:
    moments = [(0.0, 1, {"samples": 1000.0}), (1.0, 1, {"samples": 1100.0})]
    assert series(*moments, (2.0, 2, {"samples": 10.0})).rate("samples", 10.0) is None
    again = series(*moments, (2.0, 2, {"samples": 10.0}), (3.0, 2, {"samples": 30.0}))
    assert again.window(10.0) == (2, 3)
    assert again.rate("samples", 10.0) == 20.0


def test_a_metric_that_appears_late_grows_from_its_first_value() -> None:
    one = series((0.0, 1, {}), (1.0, 1, {"rows": 100}), (3.0, 1, {"rows": 140}))
    assert one.rate("rows", 10.0) == 20.0
    assert one.grown("rows", 0, 2) == 140.0, "a counter begins at zero"
    one.add(Snapshot(4.0, 1, {}))
    assert one.rate("rows", 10.0) is None
    assert one.grown("rows", 0, 3) == 0.0


@pytest.mark.parametrize(("key", "grown"), [("steps", 3.0), ("rows", 0.0), ("none", 0.0)])
def test_growth_between_two_moments(key: str, grown: float) -> None:
    one = series((0.0, 1, {"steps": 4, "rows": 9}), (1.0, 1, {"steps": 7, "rows": 5}))
    assert one.grown(key, 0, 1) == grown


def test_a_file_system_that_does_not_reply_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "listdir", stale)
    assert not History(tmp_path).poll()
