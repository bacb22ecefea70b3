# SPDX-License-Identifier: Apache-2.0
"""Large gradients are marked with a codec and keep the value order of their parameters."""

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
    """The names of parameters in each bucket, by codec."""
    members = members_of(form.graph)
    found: dict[str, list[list[str]]] = {}
    for reduction in all_reduces_of(form.graph):
        names = [str(mark.args[1]) for mark in members[reduction.index]]
        found.setdefault(str(reduction.begin.kwargs.get("codec")), []).append(names)
    return found


def test_only_gradients_of_covered_parameters_are_marked() -> None:
    form = rewritten(program_of(net()).form, INSERT, MATRICES)
    found = coded(form)
    assert sorted(found["int8"]) == [["0.weight"], ["4.weight"]]
    assert len(found["None"]) == 4
    # 132 of 171 values travel as one byte
    before, after = 171 * 8 / 2**20, (132 + 39 * 8) / 2**20
    assert form.reports[-1] == f"2 of 6 gradients travel as int8: {before:.2f} -> {after:.2f} MiB"


@pytest.mark.parametrize(
    "passes", [(FUSE, Overlap()), (FUSE,)], ids=lambda passes: "-".join(p.name for p in passes)
)
def test_marked_gradients_share_buckets_in_a_fixed_order(passes: tuple[Pass, ...]) -> None:
    found = coded(rewritten(program_of(net()).form, INSERT, MATRICES, *passes))
    assert found["int8"] == [["4.weight", "0.weight"]]
    assert [sorted(names) for names in found["None"]] == [
        ["0.bias", "1.bias", "1.weight", "4.bias"]
    ]


def test_compress_after_fusing_is_refused() -> None:
    with pytest.raises(PlanError, match="compress must run before the pass that fuses"):
        rewritten(program_of(net()).form, INSERT, FUSE, MATRICES)


class KeepsBuckets(Doubling):
    """Keeps the values of each bucket when its reduction begins."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Tensor] = {}

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        self.held[index] = bucket.clone()
        super().begin(index, bucket, inner)


class Turned(nn.Module):
    """Backward computes the gradient in another layout than the parameter's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 8).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t().contiguous()


@pytest.mark.parametrize("limits", [BucketLimits(), BucketLimits(count=1)], ids=["fused", "single"])
def test_bucket_values_have_the_order_of_their_parameters(limits: BucketLimits) -> None:
    ours, theirs = nn.Sequential(Turned()), nn.Sequential(Turned())
    captured = program_of(ours)
    assert not made_by(gradients_of(captured.form.graph)[0]).meta["val"].is_contiguous()
    program = captured.apply(INSERT, MATRICES, FuseAllReduce(limits), Overlap())
    reductions = KeepsBuckets()
    eager(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), batch(0))
    with reducing(reductions):
        static.Executor().run(program, batch(0), [])
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
    doubled = theirs[0].weight.grad
    assert isinstance(doubled, Tensor)
    torch.testing.assert_close(reductions.held[0], doubled.flatten() / 2)


def test_marked_gradients_train_as_before() -> None:
    ours, theirs = net(), net()
    program = program_of(ours).apply(INSERT, MATRICES, FUSE, Overlap())
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        torch.manual_seed(number)
        eager(theirs, other, batch(number))
        torch.manual_seed(number)
        run(program, batch(number))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
