# SPDX-License-Identifier: Apache-2.0
"""`Replica`: one module, alike on all workers, whose gradients are reduced during backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from fleetlight.collective import agreement
from fleetlight.collective.agreement import Terms
from fleetlight.collective.buckets import MIB, BucketLimits, assign
from fleetlight.collective.codec import Codec
from fleetlight.collective.ddp import BackwardBuckets
from fleetlight.collective.group import Group
from fleetlight.collective.position import UNKNOWN, Position, Stamp, check_equally_far
from fleetlight.collective.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.routes.routing import route_of
from fleetlight.collective.sink import outputs_of, through_sink
from fleetlight.errors import PlanError
from fleetlight.observe.log import logger

_OPERATION = "all_reduce of the gradients"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are reduced: what a strategy says about it."""

    limits: BucketLimits = dataclasses.field(default_factory=BucketLimits)
    codec: Codec = dataclasses.field(default_factory=Codec)
    average: bool = True
    synchronous: bool = False
    communicators: int = 1
    shared_memory: bool = True
    #: workers that sum first among themselves, 0: those of a host; None: all at once
    inner: int | None = None
    find_unused: bool = False


def reducer_of(group: Group, reduction: Reduction) -> Reducer:
    """The reducer of a group. Making it is a meeting of all of them."""
    return Reducer(
        group.size,
        group.communicators(reduction.communicators),
        route=route_of(
            group,
            shared_memory=reduction.shared_memory,
            inner=reduction.inner,
            communicators=reduction.communicators,
        ),
        codec=reduction.codec,
        synchronous=reduction.synchronous,
    )


class Replica:
    """Keeps one module alike on all workers. Making it is a meeting of all of them."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        reduction: Reduction,
        *,
        settings: Terms = (),
        terms: Callable[[], Terms] = tuple,
    ) -> None:
        """`settings` are compared once, `terms` whenever gradients are reduced."""
        agreement.check_same_module(module, group, settings)
        self._group = group
        self._terms = terms
        #: behind which batch this worker is
        self.position: Position = UNKNOWN
        self._reduction = reduction
        # one without elements stands for a table, whose rows are elsewhere
        self._parameters = [
            (n, p) for n, p in module.named_parameters() if p.requires_grad and p.numel()
        ]
        #: where the buffers are, not which: a forward may put new tensors there
        self._buffers = [
            (part, name) for part in module.modules() for name in part._buffers if name
        ]
        group.broadcast([*module.parameters(), *self._live_buffers()], "first values of the model")
        self.reducer = reducer_of(group, reduction)
        self._buckets = self._make_buckets(module)
        self._asked_inputs = False
        self._seen_backward = False
        self._reported = False
        self._warned_late = False
        self._is_complete = False
        self._futures: list[Future[Tensor]] = []
        #: how many times gradients have been reduced
        self.reductions = 0
        #: True when some gradient has changed since all were reduced
        self._dirty = False
        self._accumulating = [
            p.register_post_accumulate_grad_hook(self._touched)  # type: ignore[no-untyped-call]
            for _, p in self._parameters
        ]

    def _make_buckets(self, module: nn.Module) -> BackwardBuckets | None:
        if not self._parameters:
            return None  # everything is frozen: nothing to reduce
        return BackwardBuckets(
            self._parameters,
            sparse=_sparse_names(module),
            limits=self._reduction.limits,
            group=self._group.communicators(1)[0],
            find_unused=self._reduction.find_unused,
            on_bucket=self._on_bucket,
        )

    # -- forward and backward

    def before_forward(self, inputs: Any, reduces: bool) -> None:
        """Called before a forward that trains, `reduces` if its backward is to be reduced."""
        if not self._asked_inputs:
            self._asked_inputs = True
            agreement.warn_if_same_records(inputs, self._group)
        if reduces and self._buckets is not None:
            if self._buckets.unfinished():
                raise PlanError(self._unused_text())
            with self._group.named("agreeing on the buckets"):
                regrouped = self._buckets.before_forward()
            if regrouped:
                self._reported = False
        self._group.broadcast(self._live_buffers(), "buffers of the model")

    @property
    def factor(self) -> float:
        """How many times as large gradients are inside the model, for the mean to be right."""
        weight = self.reducer.weight
        # the mean over the workers of gradients as many times as large is their sum
        return weight if self._reduction.average else weight * self._group.size

    def after_forward(self, output: Any, reduces: bool) -> Any:
        """Called with the output of a forward that trains; answers what the caller gets."""
        find_unused = self._reduction.find_unused and reduces
        if reduces and self._buckets is not None:
            self._buckets.after_forward(outputs_of(output) if find_unused else [])
        return through_sink(output) if find_unused else output

    def _live_buffers(self) -> list[Tensor]:
        found = (part._buffers.get(name) for part, name in self._buffers)
        return [buffer for buffer in found if buffer is not None]

    def _touched(self, _: Tensor) -> None:
        self._dirty = True

    def _on_bucket(self, index: int, is_last: bool, buffer: Tensor) -> Future[Tensor]:
        if index == 0:
            self._futures.clear()
            # a callback of the engine raises our own error out of backward(), type and all;
            # what a future raises would arrive as the text of a RuntimeError
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
            self._renew_stamp()
        future = self.reducer.reduce(Bucket(index, buffer))
        self._futures.append(future)
        self._is_complete = is_last
        if is_last and not self._reported:
            self._report(index + 1)
        return future

    def _finish_backward(self) -> None:
        self._settle(self._futures, _OPERATION)
        self._futures.clear()
        if self._is_complete:
            self._dirty = False
            self.reductions += 1

    def _renew_stamp(self) -> None:
        self.reducer.stamp = Stamp(self.position, agreement.checksum(self._terms()))

    def _settle(self, reductions: Sequence[Future[Tensor]], operation: str) -> None:
        """Wait for what has been started, and see that it is what it should be."""
        with self._group.named(operation):
            self.reducer.finish()
            for reduction in reductions:
                reduction.wait()
            if self.reducer.failures:
                failure = self.reducer.failures[0]
                self.reducer.failures.clear()
                raise failure
        stamps = self.reducer.stamps()
        check_equally_far({index: stamp.position for index, stamp in stamps.items()})
        agreement.check_same_terms(stamps, self._terms(), self._group)

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
        """See that the gradients about to be used are reduced; reduce them now if need be.

        Reducing again what has been reduced leaves it as it is, see `Reducer`. `expected`: the
        gradients were held back on purpose. `used`: `reductions` when gradients were used last. If
        none came since, those that are there were assigned, which no hook tells.
        """
        if self._buckets is not None and self._buckets.unfinished():
            raise PlanError(self._unused_text())
        if used == self.reductions:
            self.mark_unreduced()
        if self._dirty:
            self._reduce_late(expected)

    def mark_unreduced(self) -> None:
        """The gradients that are there came about behind this replica's back."""
        self._dirty = any(p.grad is not None for _, p in self._parameters)

    def _unused_text(self) -> str:
        unused = [name for name, p in self._parameters if p.grad is None]
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        return (
            f"{len(unused)} of {len(self._parameters)} parameters got no gradient in this backward "
            f"({shown or 'all have an old one'}), so the reduction could not finish. If that is "
            "meant, set find_unused_parameters=True in the strategy; else use them in the loss, or "
            "give them requires_grad_(False)"
        )

    @torch.no_grad()
    def _reduce_late(self, expected: bool) -> None:
        """Gradients that came about without the module's own forward, or after it."""
        if not expected and not self._warned_late:
            self._warned_late = True
            logger.warning(
                "gradients were not reduced during backward (was the model called as a whole, "
                "outside no_sync, and its gradients made by backward()?); reducing them before the "
                "step, without overlap"
            )
        if not expected:
            # only some workers may be here; who is not must not be met in another collective
            self._group.assemble("reducing gradients before the step")
        tensors = [p for _, p in self._parameters]
        mine = torch.tensor([p.grad is not None for p in tensors], dtype=torch.int32)
        used = self._group.all_reduce(mine.to(self._group.device), "max").tolist()
        grads = [_gradient(p) for p, some in zip(tensors, used, strict=True) if some]
        sizes = [g.numel() * g.element_size() for g in grads]
        kinds = [(g.dtype, g.device) for g in grads]
        buckets = [
            [grads[i] for i in indices] for indices in assign(sizes, kinds, self._reduction.limits)
        ]
        flats = [torch.cat([g.reshape(-1) for g in bucket]) for bucket in buckets]
        self._renew_stamp()
        started = [self.reducer.reduce(Bucket(i, flat)) for i, flat in enumerate(flats)]
        self._settle(started, "all_reduce of late gradients")
        if expected and not self._reported:
            self._seen_backward = True  # these buckets are the final ones
            self._report(len(buckets))
        for bucket, flat in zip(buckets, flats, strict=True):
            _copy_back(flat, bucket)
        self._dirty = False
        self.reductions += 1

    # -- leaving

    def close(self) -> None:
        """Let go of torch's reducer, which holds the process group."""
        self._futures.clear()
        for hook in self._accumulating:
            hook.remove()
        self.reducer.close()
        del self._buckets, self.reducer


def _sparse_names(module: nn.Module) -> set[str]:
    """Parameters whose gradients are sparse: the weights of embeddings that say so."""
    return {
        f"{name}.weight" if name else "weight"
        for name, child in module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }


def _copy_back(flat: Tensor, grads: list[Tensor]) -> None:
    parts = torch.split(flat, [g.numel() for g in grads])
    torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient, dense, with zeros where only another worker has one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    elif 0 in parameter.grad.stride():
        # assigned, and expanded from fewer elements: nothing could be written there
        parameter.grad = parameter.grad.clone()
    return parameter.grad
