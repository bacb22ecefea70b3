# SPDX-License-Identifier: Apache-2.0
"""`Summing`: what reductions of a program do in a job, and what workers tell each other by them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from fleetlight.collective import agreement
from fleetlight.collective.codec import Codec
from fleetlight.collective.group import Group
from fleetlight.collective.position import Position, Stamp, check_equally_far
from fleetlight.collective.replica import reducer_of
from fleetlight.fleet.context import Context
from fleetlight.fleet.model import reduction_of
from fleetlight.fleet.terms import terms_of
from fleetlight.static.graph.reductions import GroupReductions, reducing


class Summing:
    """Takes the means of a program's gradients over the workers. Making it is a meeting of all."""

    def __init__(self, context: Context, group: Group) -> None:
        self._context, self._group = context, group
        # narrow types are the business of a pass
        reduction = dataclasses.replace(reduction_of(context), codec=Codec())
        self._reducer = reducer_of(group, reduction)
        self._reductions = GroupReductions(self._reducer, group, self._check)
        self._program = 0

    @contextlib.contextmanager
    def at(self, position: Position, program: int) -> Iterator[None]:
        """Inside the block a program reduces with the others, who are told where this worker is.

        `program` is its number, the same on all workers.
        """
        self._program = program
        self._reductions.prepare(Stamp(position, agreement.checksum(self._terms())))
        with reducing(self._reductions):
            yield

    def _check(self, stamps: Mapping[int, Stamp]) -> None:
        check_equally_far({index: stamp.position for index, stamp in stamps.items()})
        agreement.check_same_terms(stamps, self._terms(), self._group)

    def _terms(self) -> agreement.Terms:
        return [
            *terms_of(self._context),
            ("the program that runs, in the order of their first runs,", self._program),
        ]

    def close(self) -> None:
        """Let go of what was opened for it, and of the process groups."""
        self._reducer.close()
        del self._reducer, self._reductions
