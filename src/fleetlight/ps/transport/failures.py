# SPDX-License-Identifier: Apache-2.0
"""Errors across a connection: the class and the sentence travel, nothing else. Pure."""

from __future__ import annotations

from fleetlight import errors
from fleetlight.errors import FleetError, PeerError
from fleetlight.ps.messages import Failure


def failure_of(error: Exception) -> Failure:
    """An error as a message."""
    known = next((c.__name__ for c in type(error).__mro__ if _class(c.__name__) is c), None)
    if known is None:
        return Failure(PeerError.__name__, f"{type(error).__name__}: {error}")
    return Failure(known, str(error))


def error_of(failure: Failure, peer: str) -> FleetError:
    """The error a message names; its text says who sent it."""
    kind = _class(failure.kind) or PeerError
    return kind(f"{peer}: {failure.text}")


def _class(name: str) -> type[FleetError] | None:
    """One of our own error classes by its name, and nothing else that a stranger may name."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, FleetError) else None
