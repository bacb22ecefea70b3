# SPDX-License-Identifier: Apache-2.0
"""Reductions without workers: each gradient is doubled, and unreadable until its reduction ends."""

import torch
from torch import Tensor, fx, nn

from fleetlight import static
from fleetlight.static.graph.form import Form, Pass
from fleetlight.static.ops.reductions import REDUCE, REDUCED, reducing

#: keeps the code of a program between runs
_EXECUTOR = static.Executor()


class Doubling:
    """Logs the order in which reductions begin and end."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.types: list[torch.dtype] = []
        #: the inner group size that each reduction asked for
        self.inner: list[int | None] = []
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        """Fills the bucket with NaN, so that an early read shows."""
        assert bucket.dim() == 1
        assert bucket.is_contiguous()
        self.log.append(("begin", index))
        self.types.append(bucket.dtype)
        self.inner.append(inner)
        self._kept[index] = bucket, 2 * bucket
        bucket.fill_(float("nan"))

    def end(self, index: int, bucket: Tensor) -> None:
        """Restores the same memory with doubled values."""
        self.log.append(("end", index))
        bucket_at_begin, doubled = self._kept.pop(index)
        assert bucket_at_begin.data_ptr() == bucket.data_ptr()
        bucket.copy_(doubled)


def rewritten(form: Form, *passes: Pass) -> Form:
    """Applies the passes and checks that none changes the form it was given."""
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
    """The same step without a program."""
    loss = nn.functional.cross_entropy(model(feed["x"]), feed["y"])
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)
    optimizer.step()
    return loss.detach()


def reductions(graph: fx.Graph) -> list[tuple[str, int]]:
    """The reductions of a graph, in order."""
    names = {REDUCE: "begin", REDUCED: "end"}
    return [(names[n.target], int(str(n.args[1]))) for n in graph.nodes if n.target in names]
