# SPDX-License-Identifier: Apache-2.0
"""Clipping equals that of torch and runs between reduction and step."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.static.doubling import run
from tests.static.nets import accuracy, batch, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.collective.buckets import BucketLimits
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static import passes
from fleetlight.static.ops.marks import GRADIENT

pytestmark = pytest.mark.slow

Clipper = Callable[[Iterable[Tensor]], Any]
CLIPS: list[tuple[dict[str, float], Clipper]] = [
    ({"clip_norm": 0.5}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)),
    ({"clip_norm": 50.0}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 50.0)),
    ({"clip_value": 0.02}, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02)),
]


def captured(model: nn.Module, optimizer: torch.optim.Optimizer, **clip: float) -> static.Program:
    loss = nn.functional.cross_entropy
    return static.capture(model, loss, optimizer, batch(0), {"accuracy": accuracy}, **clip)


@pytest.mark.parametrize("every", [2, 1])
@pytest.mark.parametrize(("clip", "clipper"), CLIPS)
def test_clipping_equals_eager_clipping(
    clip: dict[str, float], clipper: Clipper, every: int
) -> None:
    """Merged gradients are clipped once, after the merge."""
    ours, theirs = net(), net()
    mine, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, theirs))
    program, executor = captured(ours, mine, **clip), static.Executor()
    if every > 1:
        program.passes = (passes.GradientMerge(every, True),)
    for number in range(4):
        given = batch(number)
        torch.manual_seed(number)
        (nn.functional.cross_entropy(theirs(given["x"]), given["y"]) / every).backward()
        if (number + 1) % every == 0:
            clipper(theirs.parameters())
            other.step()
            other.zero_grad()
        torch.manual_seed(number)
        executor.run(program, given)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-11)


def test_the_norm_can_be_fetched() -> None:
    ours, theirs = net(), net()
    program = captured(ours, torch.optim.SGD(ours.parameters(), lr=0.1), clip_norm=0.1)
    torch.manual_seed(0)
    nn.functional.cross_entropy(theirs(batch(0)["x"]), batch(0)["y"]).backward()
    given = batch(0)
    torch.manual_seed(0)
    theirs.zero_grad()
    nn.functional.cross_entropy(theirs(given["x"]), given["y"]).backward()
    torch.manual_seed(0)
    (norm,) = static.Executor().run(program, given, ["gradient_norm"])
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in theirs.parameters()]))


def test_only_the_optimizer_uses_clipped_gradients() -> None:
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
    marks = [node for node in program.form.graph.nodes if node.target is GRADIENT]
    assert len(marks) == 6
    for mark in marks:
        assert mark.meta["part"] == "backward"
        assert {user.meta["part"] for user in mark.users} == {"update"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("clip", "words"),
    [
        ({"clip_norm": 0}, "^clip_norm: got 0, expected a number above 0$"),
        ({"clip_value": -1.0}, "^clip_value: got -1.0, expected a number above 0$"),
        ({"clip_norm": "1"}, "^clip_norm: got '1', expected a number above 0$"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "^got clip_norm=1.0 and clip_value=1.0, expected"),
    ],
)
def test_invalid_limits_are_refused(clip: dict[str, Any], words: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=words):
        captured(model, torch.optim.SGD(model.parameters(), lr=0.1), **clip)


def test_clipping_with_parameter_servers_is_refused() -> None:
    class ServerDistributor:
        def register(self, program: static.Program) -> tuple[str, ...]:
            return ("forward", "backward")

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.distributor = ServerDistributor()  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="so it cannot clip its gradients; train eagerly"):
        captured(model, optimizer, clip_norm=1.0)


def test_clipping_runs_after_the_reduction() -> None:
    """Reductions double the gradients here; the doubled gradients are clipped."""
    ours, theirs = net(), net()
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs))
    program = captured(ours, mine, clip_norm=0.5)
    program.passes = (
        passes.InsertAllReduce(),
        passes.FuseAllReduce(BucketLimits(bytes=400, first_bytes=400)),
        passes.Overlap(),
    )
    for number in range(3):
        given = batch(number)
        torch.manual_seed(number)
        other.zero_grad()
        nn.functional.cross_entropy(theirs(given["x"]), given["y"]).backward()
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        other.step()
        torch.manual_seed(number)
        run(program, given)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-11)
