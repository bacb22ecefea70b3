# SPDX-License-Identifier: Apache-2.0
"""Reductions without workers: gradients come back twice as large, and are not to be had before."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from fleetlight import static
from fleetlight.static.graph.form import Form, Pass
from fleetlight.static.ops.reductions import REDUCE, REDUCED, reducing

#: which knows the code of a program when it is run again
_EXECUTOR = static.Executor()


class Doubling:
    """Says in which order buckets began and were waited for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.types: list[torch.dtype] = []
        #: how many workers were to form an inner group
        self.inner: list[int | None] = []
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        """Whoever reads the bucket from now on reads nonsense."""
        assert bucket.dim() == 1
        assert bucket.is_contiguous()
        self.log.append(("begin", index))
        self.types.append(bucket.dtype)
        self.inner.append(inner)
        self._kept[index] = bucket, 2 * bucket
        bucket.fill_(float("nan"))

    def end(self, index: int, bucket: Tensor) -> None:
        """The same memory comes back."""
        self.log.append(("end", index))
        begun, doubled = self._kept.pop(index)
        assert begun.data_ptr() == bucket.data_ptr()
        bucket.copy_(doubled)


def rewritten(form: Form, *passes: Pass) -> Form:
    """The form after these passes, none of which has changed the one it was given."""
    for rewrite in passes:
        before = str(form.graph)
        after = rewrite(form)
        after.graph.lint()
        assert str(form.graph) == before
        form = after
    return form


def run(
    program: static.Program, feed: dict[str, Tensor], *names: str
) -> tuple[Doubling, list[Tensor]]:
    """One step with doubled gradients."""
    doubling = Doubling()
    with reducing(doubling):
        out = _EXECUTOR.run(program, feed, list(names))
    return doubling, out


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, feed: dict[str, Tensor]) -> Tensor:
    """The same without a program."""
    loss = nn.functional.cross_entropy(model(feed["x"]), feed["y"])
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)
    optimizer.step()
    return loss.detach()


def reductions(graph: fx.Graph) -> list[tuple[str, int]]:
    """What of them is in a graph, in its order."""
    names = {REDUCE: "begin", REDUCED: "end"}
    return [(names[n.target], int(str(n.args[1]))) for n in graph.nodes if n.target in names]
