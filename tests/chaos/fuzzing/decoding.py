# SPDX-License-Identifier: Apache-2.0
"""Frames against the decoder alone: each is a message, or refused in a sentence."""

import random

import numpy as np
from tests.chaos.fuzzing.making import Frame, any_arrays, any_message, damaged, framed

from fleetlight.errors import ProtocolError
from fleetlight.ps.messages import Message
from fleetlight.ps.transport.protocol import PREFIX_BYTES, MessageCodec, Prefix, views

_CODEC: MessageCodec[Message] = MessageCodec(Message)
#: frames that are damaged
_POOL = 400


class Decoding:
    """A pool of frames, and their damaged forms."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"{seed} pool")
        self._seed = seed
        self._pool = [self._any(chance, number) for number in range(_POOL)]

    def _any(self, chance: random.Random, number: int) -> Frame:
        return framed(number, (any_message(chance), any_arrays(chance)))

    def made(self, number: int) -> bytes:
        """The bytes of the frame with that number."""
        chance = random.Random(f"{self._seed} {number}")
        if number % 50 == 0:
            return self._any(chance, number).packed()
        return damaged(chance, chance.choice(self._pool), chance.choice(self._pool))

    def run(self, number: int) -> bool:
        """Decode it; True where it is a frame. Any other error is a failure."""
        try:
            _decode(self.made(number))
        except ProtocolError:
            return False
        return True


def _decode(data: bytes) -> None:
    """Decode as `Frames` does, without waiting."""
    prefix = Prefix.parse(data[:PREFIX_BYTES])
    split = PREFIX_BYTES + prefix.header
    header = _CODEC.decode_header(prefix, data[PREFIX_BYTES:split])
    body = np.frombuffer(data[split : split + prefix.body], np.uint8)
    if len(body) != prefix.body:
        raise ProtocolError("it ends early, which a connection notices")
    for place, array in zip(header.places, views(header.places, body), strict=True):
        assert array.nbytes == place.nbytes
