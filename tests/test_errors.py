# SPDX-License-Identifier: Apache-2.0
"""Which errors another start of the job would not cure."""

from __future__ import annotations

import pytest

from fleetlight import errors


@pytest.mark.parametrize(
    "kind",
    [
        errors.ConfigError,
        errors.StrategyError,
        errors.PlanError,
        errors.CorruptCheckpointError,
        errors.JournalError,
        errors.DataError,
    ],
)
def test_what_somebody_has_to_mend_first_lasts(kind: type[Exception]) -> None:
    assert errors.is_lasting(kind("x"))


@pytest.mark.parametrize(
    "kind",
    [
        errors.AddressError,
        errors.ComebackError,
        errors.DivergedError,
        errors.LostCheckpointError,
        errors.PeerLostError,
        errors.DeadlineError,
        errors.GradientError,
        RuntimeError,
        ValueError,
        OSError,
        KeyboardInterrupt,
    ],
)
def test_what_may_go_well_the_next_time_does_not(kind: type[BaseException]) -> None:
    assert not errors.is_lasting(kind("x"))
