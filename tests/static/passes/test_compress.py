# SPDX-License-Identifier: Apache-2.0
"""Large gradients are told to travel in another form, in the order of their parameters' numbers."""

from __future__ import annotations

import pytest
import torch
from tests.static.doubling import Doubling, eager, rewritten, run
from tests.static.nets import batch, net
from tests.static.passes.test_insert_all_reduce import program_of
from torch import Tensor, nn

from fleetlight import static
from fleetlight.collective.buckets import BucketLimits
from fleetlight.errors import PlanError
from fleetlight.static.graph.form import Form, Pass
from fleetlight.static.ops.reductions import reducing
from fleetlight.static.passes import Compress, FuseAllReduce, InsertAllReduce, Overlap
from fleetlight.static.rewriting.all_reduces import all_reduces_of, members_of
from fleetlight.static.rewriting.nodes import gradients_of, made_by

pytestmark = pytest.mark.slow

INSERT, FUSE = InsertAllReduce(), FuseAllReduce()
MATRICES = Compress("int8", lambda parameter: parameter.dim() > 1, lambda values: values)


def coded(form: Form) -> dict[str, list[list[str]]]:
    """Names of the parameters in the buckets, by the form in which these travel."""
    members = members_of(form.graph)
    found: dict[str, list[list[str]]] = {}
    for reduction in all_reduces_of(form.graph):
        names = [str(mark.args[1]) for mark in members[reduction.index]]
        found.setdefault(str(reduction.begin.kwargs.get("codec")), []).append(names)
    return found


def test_only_gradients_of_parameters_that_are_covered_say_so() -> None:
    form = rewritten(program_of(net()).form, INSERT, MATRICES)
    found = coded(form)
    assert sorted(found["int8"]) == [["0.weight"], ["4.weight"]]
    assert len(found["None"]) == 4
    # 132 of 171 values become one byte
    before, after = 171 * 8 / 2**20, (132 + 39 * 8) / 2**20
    expected = f"2 of 6 gradients travel as int8: {before:.2f} -> {after:.2f} MiB"
    assert form.reports[-1] == expected


@pytest.mark.parametrize(
    "passes", [(FUSE,), (FUSE, Overlap())], ids=lambda passes: "-".join(p.name for p in passes)
)
def test_they_share_buckets_with_their_like_in_a_known_order(passes: tuple[Pass, ...]) -> None:
    found = coded(rewritten(program_of(net()).form, INSERT, MATRICES, *passes))
    assert found["int8"] == [["4.weight", "0.weight"]]
    assert [sorted(names) for names in found["None"]] == [
        ["0.bias", "1.bias", "1.weight", "4.bias"]
    ]


def test_behind_the_buckets_it_is_too_late() -> None:
    with pytest.raises(PlanError, match="compress must run before the pass that fuses"):
        rewritten(program_of(net()).form, INSERT, FUSE, MATRICES)


class Seeing(Doubling):
    """Keeps what the buckets held when they began."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Tensor] = {}

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        self.held[index] = bucket.clone()
        super().begin(index, bucket, inner)


class Turned(nn.Module):
    """Backward leaves the gradient in another order than that of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 8).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t().contiguous()


@pytest.mark.parametrize("limits", [BucketLimits(), BucketLimits(count=1)], ids=["fused", "single"])
def test_values_lie_as_those_of_their_parameters(limits: BucketLimits) -> None:
    ours, theirs = nn.Sequential(Turned()), nn.Sequential(Turned())
    captured = program_of(ours)
    gradient = made_by(gradients_of(captured.form.graph)[0]).meta["val"]
    assert not gradient.is_contiguous()
    program = captured.apply(INSERT, MATRICES, FuseAllReduce(limits), Overlap())
    seeing = Seeing()
    eager(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), batch(0))
    with reducing(seeing):
        static.Executor().run(program, batch(0), [])
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
    doubled = theirs[0].weight.grad
    assert isinstance(doubled, Tensor)
    torch.testing.assert_close(seeing.held[0], doubled.flatten() / 2)


def test_it_trains_as_before() -> None:
    ours, theirs = net(), net()
    program = program_of(ours).apply(INSERT, MATRICES, FUSE, Overlap())
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        torch.manual_seed(number)
        eager(theirs, other, batch(number))
        torch.manual_seed(number)
        run(program, batch(number))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
