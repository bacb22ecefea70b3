# SPDX-License-Identifier: Apache-2.0
"""`Replica`: one module on all workers, whose gradients are reduced during backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from fleetlight.collective.buckets import MIB, BucketLimits, ParameterSlice
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.data_parallel import consistency
from fleetlight.collective.data_parallel.consistency import Terms
from fleetlight.collective.data_parallel.late_gradients import Cause, Forward, LateGradients
from fleetlight.collective.data_parallel.sink import outputs_of, through_sink
from fleetlight.collective.group import Group
from fleetlight.collective.reduction.coverage import coded_in, sparse_names, warn_of_uncoded
from fleetlight.collective.reduction.ddp import BackwardBuckets
from fleetlight.collective.reduction.reduce_now import reduce_now
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.routes.routing import RouteOptions, crosses_a_link, route_of
from fleetlight.collective.stamp import UNKNOWN, GradientStamp, Position, check_equally_far
from fleetlight.errors import PlanError, first_names
from fleetlight.observe.log import logger
from fleetlight.torch_compat.c10d import queue_callback
from fleetlight.torch_compat.modules import buffers

_OPERATION = "all_reduce of the gradients"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """How a strategy lets workers reduce gradients."""

    limits: BucketLimits = dataclasses.field(default_factory=BucketLimits)
    #: the type of values where workers share no memory
    narrow: torch.dtype | None = None
    #: the codec of covered values there
    compression: Compression | None = None
    average: bool = True
    synchronous: bool = False
    communicators: int = 1
    shared_memory: bool = True
    #: size of groups that sum first; 0: the workers of a host; None: no hierarchy
    inner: int | None = None
    find_unused: bool = False

    def within(self, group: Group) -> Reduction:
        """The part that takes effect among these workers."""
        if crosses_a_link(group, self.shared_memory):
            return self
        # NCCL does not sum in shared memory, so fewer bytes may help
        narrow = None if group.backend == "gloo" else self.narrow
        return dataclasses.replace(self, narrow=narrow, compression=None)


def reducer_of(group: Group, reduction: Reduction) -> Reducer:
    """Make the reducer of a group; all workers call it."""
    asked = reduction.within(group)
    options = RouteOptions(
        shared_memory=asked.shared_memory,
        inner=asked.inner,
        communicators=asked.communicators,
        narrow=asked.narrow,
        compression=asked.compression,
    )
    return Reducer(
        group.size,
        group.communicators(asked.communicators),
        route=route_of(group, options),
        narrow=asked.narrow,
        synchronous=asked.synchronous,
    )


class Replica:
    """Keeps one module equal on all workers; all of them make it together."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        reduction: Reduction,
        *,
        settings: Terms = (),
        terms: Callable[[], Terms] = tuple,
        broadcast_buffers: bool = True,
    ) -> None:
        """`settings` are compared once, `terms` at each reduction."""
        consistency.check_same_module(module, group, settings)
        if broadcast_buffers:
            consistency.check_buffers(module)
        self._group = group
        self._terms = terms
        #: the position of this worker's loader
        self.position: Position = UNKNOWN
        self._reduction = reduction.within(group)
        # one without elements stands for a table on servers
        self._parameters = [
            (n, p) for n, p in module.named_parameters() if p.requires_grad and p.numel()
        ]
        #: the owners and names of buffers: a forward may replace the tensors
        self._buffers = [
            (part, name)
            for part in module.modules()
            for name in buffers(part)
            if name and broadcast_buffers
        ]
        group.broadcast([*module.parameters(), *self._live_buffers()], "first values of the model")
        self.reducer = reducer_of(group, reduction)
        self._coded = self._coded_names(module)
        #: those whose gradients travel coded in this step
        self._coded_now: Collection[str] = ()
        sparse = sparse_names(module)
        self._buckets = self._make_buckets(sparse)
        #: True from a forward whose backward is reduced until the end of that reduction
        self._reduces = False
        self._asked_inputs = False
        self._seen_backward = False
        self._reported = False
        self._late = LateGradients()
        self._is_complete = False
        self._futures: list[Future[Tensor]] = []
        #: coded buckets of the current backward, with their slices
        self._coded_buckets: list[tuple[tuple[ParameterSlice, ...], Tensor]] = []
        #: the number of reductions so far
        self.reductions = 0
        #: True when a gradient has changed since the last reduction
        self._dirty = False
        self._accumulating = [
            p.register_post_accumulate_grad_hook(self._touched)  # type: ignore[no-untyped-call]
            for _, p in self._parameters
        ]
        self._accumulating += [
            p.register_post_accumulate_grad_hook(partial(self._refuse_dense, name))  # type: ignore[no-untyped-call]
            for name, p in self._parameters
            if name in sparse
        ]

    def _coded_names(self, module: nn.Module) -> set[str]:
        """The parameters whose gradients may travel coded."""
        compression = self._reduction.compression
        if compression is None:
            return set()
        compression.begin()
        coded = coded_in(module, compression)
        if self._group.index == 0:
            warn_of_uncoded(module, compression)
        return coded.keys() & {name for name, _ in self._parameters}

    def _make_buckets(self, sparse: set[str]) -> BackwardBuckets | None:
        if not self._parameters:
            return None  # all parameters are frozen
        return BackwardBuckets(
            self._parameters,
            sparse=sparse,
            limits=self._reduction.limits,
            group=self._group.communicators(1)[0],
            find_unused=self._reduction.find_unused,
            on_bucket=self._on_bucket,
            coded=self._coded,
        )

    # -- forward and backward

    def before_forward(self, inputs: Any, reduces: bool, *, alone: bool = False) -> None:
        """Called before a training forward; `reduces`: its backward is reduced.

        Workers that train `alone` keep their own buffers.
        """
        if not self._asked_inputs:
            self._asked_inputs = True
            consistency.warn_if_same_records(inputs, self._group)
        if reduces and self._buckets is not None:
            if self._buckets.unfinished():
                raise PlanError(self._unused_text())
            with self._group.named("agreeing on the buckets"):
                regrouped = self._buckets.before_forward()
            if regrouped:
                self._reported = False
        if not alone:
            self._group.broadcast(self._live_buffers(), "buffers of the model")

    @property
    def factor(self) -> float:
        """The scale of gradients inside the model with which the mean is right."""
        weight = self.reducer.weight
        # the mean of gradients times N is their sum
        return weight if self._reduction.average else weight * self._group.size

    def after_forward(self, output: Any, reduces: bool) -> Any:
        """Called with the output of a training forward; returns the output for the caller."""
        find_unused = self._reduction.find_unused and reduces
        if reduces and self._buckets is not None:
            self._buckets.after_forward(outputs_of(output) if find_unused else [])
        self._reduces = reduces
        self._late.called(Forward.WHOLE if reduces else Forward.HELD)
        return through_sink(output) if find_unused else output

    def evaluated(self) -> None:
        """Called at a forward in eval mode with a graph, whose backward does not reduce."""
        self._late.called(Forward.EVAL)

    def stepped(self) -> None:
        """Called after a step that has used the gradients."""
        self._late.stepped()

    def _live_buffers(self) -> list[Tensor]:
        found = (buffers(part).get(name) for part, name in self._buffers)
        return [buffer for buffer in found if buffer is not None]

    def _touched(self, _: Tensor) -> None:
        if not self._dirty:
            self._dirty = True
            self._late.touched()

    def _refuse_dense(self, name: str, parameter: Tensor) -> None:
        """Raise where torch's reducer would, with a name and advice."""
        if self._reduces and parameter.grad is not None and not parameter.grad.is_sparse:
            layer = name.removesuffix(".weight")
            raise PlanError(
                f"{name} got a dense gradient, expected a sparse one, since its embedding has "
                "sparse=True: the loss uses the whole weight, too. Use rows in its place, such as "
                f"fleet.rows({layer}, ids), or build {layer} with sparse=False"
            )

    def _on_bucket(self, index: int, is_last: bool, buffer: Tensor) -> Future[Tensor]:
        if index == 0:
            self._futures.clear()
            self._coded_buckets.clear()
            # an error from a callback of the engine leaves backward() as it is;
            # an error from a future would become the text of a RuntimeError
            queue_callback(self._finish_backward)
            self._prepare()
        parts = self._buckets.coded[index] if self._coded_now and self._buckets else ()
        if parts:
            self._coded_buckets.append((parts, buffer))
        future = self.reducer.reduce(Bucket(index, buffer, parts))
        self._futures.append(future)
        self._is_complete = is_last
        if is_last and not self._reported:
            self._report(index + 1)
        return future

    def _finish_backward(self) -> None:
        self._settle(self._futures, _OPERATION)
        self._futures.clear()
        if self._is_complete:
            if self._coded_buckets:
                self._receive(
                    {
                        part.name: values
                        for parts, buffer in self._coded_buckets
                        for part, values in zip(parts, _split(parts, buffer), strict=True)
                    }
                )
            self._dirty = self._reduces = False
            self._late.reduced(during_backward=True)
            self.reductions += 1

    @property
    def compression(self) -> Compression | None:
        """The compression of gradients, where it takes effect."""
        return self._reduction.compression

    def _receive(self, means: Mapping[str, Tensor]) -> None:
        """Pass on means that have travelled coded."""
        self._coded_buckets.clear()
        if self.compression is not None:
            self.compression.receive(means)

    def _prepare(self) -> None:
        """Choose the form of gradients and set the stamp, before they travel."""
        compression = self.compression
        is_coded = compression is not None and compression.prepare()
        self._coded_now = self._coded if is_coded else ()
        self.reducer.stamp = GradientStamp(self.position, consistency.checksum(self._terms()))

    def _settle(self, reductions: Sequence[Future[Tensor]], operation: str) -> None:
        """Wait for reductions, and check that all workers were at one position on equal terms."""
        with self._group.named(operation):
            self.reducer.settle(reductions)
        stamps = self.reducer.stamps()
        check_equally_far({index: stamp.position for index, stamp in stamps.items()})
        consistency.check_same_terms(stamps, self._terms(), self._group)

    def _report(self, buckets: int) -> None:
        final = self._seen_backward or not (self._buckets and self._buckets.regroups)
        self._seen_backward = True
        self._reported = final
        if final and self._group.index == 0:
            size = self._reduction.limits.bytes / MIB
            fused = f" ({size:g} MiB)" if size >= 0.01 else ""
            logger.info("all_reduce: %d -> %d%s", len(self._parameters), buckets, fused)

    # -- around the optimizer's step

    def ensure_reduced(self, *, expected: bool = False, used: int = -1) -> None:
        """Reduce gradients now, before their use, unless backward has reduced them.

        A second reduction leaves reduced gradients as they are, see `Reducer`. `expected`: the
        gradients were not reduced on purpose. `used`: `reductions` at their last use. Without a
        reduction since then, the script assigned the gradients, which no hook sees.
        """
        if self._buckets is not None and self._buckets.unfinished():
            raise PlanError(self._unused_text())
        if used == self.reductions:
            self.mark_unreduced()
        if self._dirty:
            self._reduce_late(expected)

    def mark_unreduced(self, cause: Cause = Cause.ASSIGNED) -> None:
        """Note gradients that this replica's hooks did not see."""
        if not self._dirty:
            self._late.marked(cause)
        self._dirty = any(p.grad is not None for _, p in self._parameters)

    def _unused_text(self) -> str:
        unused = [name for name, p in self._parameters if p.grad is None]
        return (
            f"{len(unused)} of {len(self._parameters)} parameters got no gradient in this backward "
            f"({first_names(unused, 5) or 'all have an old one'}), so the reduction could not "
            "finish. If that is meant, set find_unused_parameters=True in the strategy; else use "
            "them in the loss, or give them requires_grad_(False)"
        )

    @torch.no_grad()
    def _reduce_late(self, expected: bool) -> None:
        """Reduce gradients that came without the module's own forward, or after it."""
        if not expected:
            if (warning := self._late.warning()) is not None:
                logger.warning("%s", warning)
            # only some workers may call this; the others must not pair it with another collective
            self._group.assemble("reducing gradients before the step")
        mine = torch.tensor([p.grad is not None for _, p in self._parameters], dtype=torch.int32)
        used = self._group.all_reduce(mine.to(self._group.device), "max").tolist()
        pairs = zip(self._parameters, used, strict=True)
        grads = {name: _gradient(p) for (name, p), some in pairs if some}
        buckets = self._reduce_now(grads, "all_reduce of late gradients")
        coded = self._coded_now
        if coded:
            self._receive({name: grad for name, grad in grads.items() if name in coded})
        if expected and not self._reported:
            self._seen_backward = True  # these buckets are the final ones
            self._report(buckets)
        self._dirty = False
        self._late.reduced(during_backward=False)
        self.reductions += 1

    @torch.no_grad()
    def mean(self, named: Mapping[str, Tensor], operation: str) -> None:
        """As in `Means`."""
        self._reduce_now(named, operation)

    def _reduce_now(self, named: Mapping[str, Tensor], operation: str) -> int:
        """Reduce tensors in place, without overlap; returns the number of buckets."""
        self._prepare()
        return reduce_now(
            self.reducer,
            named,
            lambda started: self._settle(started, operation),
            limits=self._reduction.limits,
            parameters=dict(self._parameters),
            coded=self._coded_now,
        )

    # -- end

    def close(self) -> None:
        """Release torch's reducer, which holds the process group."""
        self._futures.clear()
        for hook in self._accumulating:
            hook.remove()
        self.reducer.close()
        del self._buckets, self.reducer


def _split(parts: Sequence[ParameterSlice], buffer: Tensor) -> Sequence[Tensor]:
    return torch.split(buffer, [part.size for part in parts])


def _gradient(parameter: Tensor) -> Tensor:
    """The dense gradient; zeros where only another worker has one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    elif 0 in parameter.grad.stride():
        # assigned, and expanded from fewer elements: not writable
        parameter.grad = parameter.grad.clone()
    return parameter.grad
