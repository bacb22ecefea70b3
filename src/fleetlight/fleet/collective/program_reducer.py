# SPDX-License-Identifier: Apache-2.0
"""`ProgramReducer`: reduces the gradients of programs, and compares the workers' positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.futures import Future

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.data_parallel import consistency
from fleetlight.collective.data_parallel.replica import reducer_of
from fleetlight.collective.group import Group
from fleetlight.collective.reduction.coverage import coded_in
from fleetlight.collective.reduction.reduce_now import reduce_at_once
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.stamp import UNKNOWN, GradientStamp, Position, check_equally_far
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.consistency import terms_of
from fleetlight.fleet.training.local_training import may_train_locally
from fleetlight.fleet.training.model import reduction_of
from fleetlight.static.graph.form import Form
from fleetlight.static.ops.reductions import GroupReductions, NoReductions, Parts, reducing
from fleetlight.static.rewriting.all_reduces import all_reduces_of, members_of


class ProgramReducer:
    """Averages gradients and parameters over the workers for the programs of a model."""

    def __init__(self, job: Job, group: Group, module: nn.Module) -> None:
        self._job, self._group, self._module = job, group, module
        self._reduction = reduction_of(job, module).within(group)
        #: by `inner` of the programs' reductions
        self._reducers: dict[int | None, Reducer] = {}
        self._compression = self._reduction.compression
        if self._compression is not None:
            self._compression.begin()
        self._reductions = GroupReductions(self._reducers, group, self._check, self._arrived)
        #: by program: the parameters in each bucket whose gradients may be compressed
        self._parts: dict[int, Parts] = {}
        self._position, self._program = UNKNOWN, 0

    def open(self, form: Form, program: int) -> None:
        """Make the reducers that a program needs; every worker calls it.

        `program` is its number, equal on all workers.
        """
        self._parts[program] = self._parts_of(form)
        asked = [reduction.inner for reduction in all_reduces_of(form.graph)]
        for inner in dict.fromkeys(asked or [None]):
            if inner not in self._reducers:
                # a pass narrows the buckets that all workers sum at once
                by_pass = inner is None and not may_train_locally(self._job)
                narrow = None if by_pass else self._reduction.narrow
                reduction = dataclasses.replace(self._reduction, inner=inner, narrow=narrow)
                self._reducers[inner] = reducer_of(self._group, reduction)

    def _parts_of(self, form: Form) -> Parts:
        known = {id(parameter): name for name, parameter in self._module.named_parameters()}
        names = {s.name: known.get(id(s.tensor), s.name) for s in form.state}
        members = members_of(form.graph)
        return {
            reduction.index: tuple(
                ParameterSlice(names[str(mark.args[1])], mark.meta["val"].numel())
                for mark in members[reduction.index]
            )
            for reduction in all_reduces_of(form.graph)
            if reduction.is_coded
        }

    def at(
        self, position: Position, program: int, *, alone: bool = False, counts: bool = True
    ) -> AbstractContextManager[None]:
        """Inside the block a program reduces with the others, and sends this worker's position.

        A worker that trains `alone` reduces nothing. A batch that does not count (`counts`) takes
        no part in the statistics of norms.
        """
        self._position, self._program = position, program
        if alone:
            return reducing(NoReductions())
        is_coded = self._compression is not None and self._compression.prepare()
        parts = self._parts[program] if is_coded else {}
        self._reductions.prepare(self._stamp(), parts, counts=counts)
        return reducing(self._reductions)

    def _arrived(self, means: Mapping[str, Tensor]) -> None:
        if self._compression is not None:
            self._compression.correct(means)

    @torch.no_grad()
    def mean(self, named: Mapping[str, Tensor], operation: str) -> None:
        """Average tensors by the reducer of the first program."""
        reducer = next(iter(self._reducers.values()))
        reducer.stamp = self._stamp()

        def settle(reductions: Sequence[Future[Tensor]]) -> None:
            with self._group.named(operation):
                reducer.settle(reductions)
            self._check(reducer.stamps())

        reduce_at_once(
            reducer,
            named,
            settle,
            limits=self._reduction.limits,
            parameters=dict(self._module.named_parameters()),
            coded=coded_in(self._module, self._compression),
        )

    def _stamp(self) -> GradientStamp:
        return GradientStamp(self._position, consistency.checksum(self._terms()))

    def _check(self, stamps: Mapping[int, GradientStamp]) -> None:
        check_equally_far({index: stamp.position for index, stamp in stamps.items()})
        consistency.check_same_terms(stamps, self._terms(), self._group)

    def _terms(self) -> consistency.Terms:
        return [
            *terms_of(self._job),
            ("the program that runs, in the order of their first runs,", self._program),
        ]

    def close(self) -> None:
        """Close the reducers and the process groups."""
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        del self._reductions
