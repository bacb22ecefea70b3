# SPDX-License-Identifier: Apache-2.0
"""The contract of exit codes."""

import os

import pytest

from fleetlight import errors
from fleetlight.launch import exit_codes
from fleetlight.launch.exit_codes import error_code, exit_code, may_pass


def test_codes_are_those_of_sysexits() -> None:
    codes = (exit_codes.PEER_FAILED, exit_codes.RESUME_CODE, exit_codes.PERMANENT)
    assert codes == (os.EX_UNAVAILABLE, os.EX_TEMPFAIL, os.EX_CONFIG) == (69, 75, 78)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RoleError("x"), 78),
        (errors.StrategyError("x"), 78),
        (errors.PlanError("x"), 78),
        (errors.JournalError("x"), 78),
        # another start may succeed
        (errors.AddressError("x"), 1),
        (errors.ComebackError("x"), 1),
        (errors.DivergedError("x"), 1),
        (errors.PeerLostError("x"), 69),
        (errors.DeadlineError("x"), 69),
        (errors.StoppedError("x"), 69),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_code_of_an_error(error: BaseException, code: int) -> None:
    assert error_code(error) == code


def test_signals_count_as_in_shells() -> None:
    assert [exit_code(status) for status in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_what_a_restart_may_change() -> None:
    assert all(map(may_pass, (1, 69, -9, -11)))
    assert not any(map(may_pass, (0, 2, 75, 78, 127)))
