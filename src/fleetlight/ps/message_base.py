# SPDX-License-Identifier: Apache-2.0
"""What all messages share: their base class, and the replies `Done` and `Failure`."""

from __future__ import annotations

import functools
import re
from typing import ClassVar

import msgspec

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.errors as errors
from fleetlight.errors import FleetError, PeerError


class MessageBase(msgspec.Struct, frozen=True, tag=True):
    """One message; on the wire, its tag is the name of its class."""

    #: True when a client may repeat the request after a lost connection
    repeatable: ClassVar[bool] = False


class Done(MessageBase, frozen=True):
    """The server carried out the request and has nothing to return."""


class Failure(MessageBase, frozen=True):
    """The server could not carry out the request: the name of an error class and its text."""

    kind: str
    text: str


def operation_of(message: object) -> str:
    """The name of a request in errors, such as `push` or `geo exchange`."""
    return _operation_of_class(type(message).__name__)


@functools.cache
def _operation_of_class(name: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    return words.removesuffix(" request")


def failure_of(error: Exception) -> Failure:
    """An error as a message: only the class and the text travel."""
    known = next((c.__name__ for c in type(error).__mro__ if _class(c.__name__) is c), None)
    if known is None:
        return Failure(PeerError.__name__, f"{type(error).__name__}: {error}")
    return Failure(known, str(error))


def error_of(failure: Failure, peer: str) -> FleetError:
    """The error that a message names; its text starts with the peer."""
    kind = _class(failure.kind) or PeerError
    return kind(f"{peer}: {failure.text}")


def _class(name: str) -> type[FleetError] | None:
    """Look up an error class of Fleetlight; a peer may name no other class."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, FleetError) else None


def encode_failure(failure: Failure) -> bytes:
    """A failure as bytes, which workers exchange through a barrier."""
    return msgspec.json.encode(failure)


def decode_failure(data: bytes) -> Failure:
    """Inverse of `encode_failure`."""
    return msgspec.json.decode(data, type=Failure)
