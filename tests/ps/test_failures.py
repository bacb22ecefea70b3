# SPDX-License-Identifier: Apache-2.0
"""Errors across a connection."""

from __future__ import annotations

import pytest

from fleetlight import errors
from fleetlight.errors import FleetError, PeerError
from fleetlight.ps.message_base import error_of, failure_of
from fleetlight.ps.messages import Failure

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, FleetError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_class_round_trips(kind: type[FleetError]) -> None:
    error = error_of(failure_of(kind("it is so")), "server 1")
    assert type(error) is kind
    assert str(error) == "server 1: it is so"


def test_an_unnamed_subclass_is_sent_as_its_nearest_base() -> None:
    class FinerError(errors.PlanError):
        pass

    assert failure_of(FinerError("x")) == Failure("PlanError", "x")


@pytest.mark.parametrize("name", ["SystemExit", "annotations", "did_you_mean", "nonsense", ""])
def test_unknown_names_become_a_peer_error(name: str) -> None:
    assert type(error_of(Failure(name, "x"), "server 1")) is PeerError


def test_a_foreign_error_keeps_its_name_in_the_text() -> None:
    assert failure_of(KeyError("w")) == Failure("PeerError", "KeyError: 'w'")
