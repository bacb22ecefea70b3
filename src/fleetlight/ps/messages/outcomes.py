# SPDX-License-Identifier: Apache-2.0
"""Answers that say no more than how it went."""

from __future__ import annotations

import msgspec

from fleetlight.ps.messages.base import Words


class Done(Words, frozen=True):
    """The request was carried out; there is nothing to say about it."""


class Failure(Words, frozen=True):
    """The request could not be carried out: the name of an error class and its sentence."""

    kind: str
    text: str


def encode_failure(failure: Failure) -> bytes:
    """A failure as bytes, for workers that tell each other."""
    return msgspec.json.encode(failure)


def decode_failure(data: bytes) -> Failure:
    """The way back."""
    return msgspec.json.decode(data, type=Failure)
