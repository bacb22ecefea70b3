# SPDX-License-Identifier: Apache-2.0
"""Errors across a connection."""

from __future__ import annotations

import pytest

from fleetlight import errors
from fleetlight.errors import FleetError, PeerError
from fleetlight.ps.messages import Failure
from fleetlight.ps.messages.base import error_of, failure_of

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, FleetError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_of_ours_comes_back(kind: type[FleetError]) -> None:
    error = error_of(failure_of(kind("it is so")), "server 1")
    assert type(error) is kind
    assert str(error) == "server 1: it is so"


def test_a_class_of_ours_that_has_no_name_here_comes_as_the_nearest() -> None:
    class FinerError(errors.PlanError):
        pass

    assert failure_of(FinerError("x")) == Failure("PlanError", "x")


@pytest.mark.parametrize("name", ["SystemExit", "annotations", "did_you_mean", "nonsense", ""])
def test_other_names_are_just_a_peers_error(name: str) -> None:
    assert type(error_of(Failure(name, "x"), "server 1")) is PeerError


def test_an_error_of_others_keeps_its_name_in_the_text() -> None:
    assert failure_of(KeyError("w")) == Failure("PeerError", "KeyError: 'w'")
