# SPDX-License-Identifier: Apache-2.0
"""Gradients that come late, or dense where they should not, sinks, and buffers."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import error_text
from tests.served import Member, Net, run
from tests.workers import run_workers
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.collective.data_parallel.consistency import check_buffers
from fleetlight.collective.data_parallel.late_gradients import Cause, Forward, LateGradients
from fleetlight.collective.data_parallel.sink import through_sink, weighted
from fleetlight.errors import PlanError
from fleetlight.observe.log import logger

SGD = torch.optim.SGD
X = torch.ones(4, 3)
Step = Callable[[Any], None]


def whole(model: Any) -> None:
    model(X).sum().backward()


def in_eval(model: Any) -> None:
    model.eval()
    whole(model)
    model.train()


def under_no_sync(model: Any) -> None:
    with fleet.no_sync():
        whole(model)


def in_parts(model: Any) -> None:
    model[1](model[0](X)).sum().backward()


def twice(model: Any) -> None:
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def by_hand(model: Any) -> None:
    found: tuple[Tensor, ...] = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient


def changed(model: Any) -> None:
    whole(model)
    model[0].weight.requires_grad_(False)


def warnings_of(*steps: Step) -> list[str]:
    """The warnings of a worker that makes these steps."""
    lines: list[str] = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    optimizer = fleet.distributed_optimizer(SGD(model.parameters(), 0.1))
    for step in steps:
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    return [line for line in lines if "not reduced during backward" in line]


def with_closure() -> tuple[list[str], list[float]]:
    """Steps as Lightning makes them: backward runs inside the step, by submodules."""
    lines: list[str] = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    optimizer = fleet.distributed_optimizer(SGD(model.parameters(), 0.1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model[1](model[0](X * (1 + fleet.worker_index()))).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    warned = [line for line in lines if "not reduced during backward" in line]
    return warned, model[0].weight.flatten().tolist()


@pytest.mark.multiprocess
def test_gradients_of_a_closure_are_reduced_with_a_warning() -> None:
    (lines, zero), (_, one) = run_workers(with_closure)
    assert zero == one
    (line,) = lines
    assert Cause.PARTS.value[0] in line


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("steps", "causes"),
    [
        ([under_no_sync, in_eval, in_parts], [Cause.HELD, Cause.EVAL, Cause.PARTS]),
        ([whole, whole], []),
        ([whole, in_eval, whole, in_eval], [Cause.EVAL]),
        ([in_eval], [Cause.EVAL]),
        ([under_no_sync], [Cause.HELD]),
        ([whole, in_parts], [Cause.PARTS]),
        ([in_parts, in_parts], [Cause.UNCALLED]),
        ([twice], [Cause.AGAIN]),
        ([whole, twice, in_parts], [Cause.AGAIN, Cause.PARTS]),
        ([by_hand], [Cause.ASSIGNED]),
        ([whole, by_hand], [Cause.ASSIGNED]),
        ([whole, changed, whole], [Cause.CHANGED]),
    ],
)
def test_the_warning_names_the_cause(steps: list[Step], causes: list[Cause]) -> None:
    for lines in run_workers(warnings_of, 2, *steps):
        assert len(lines) == len(causes)
        for line, cause in zip(lines, causes, strict=True):
            what, instead = cause.value
            assert f"backward: {what}; reducing them before the step" in line
            assert line.endswith(instead)
            others = {other.value[0] for other in Cause} - {what}
            assert not [other for other in others if other in line]


def test_an_unknown_cause_is_reported_as_unknown() -> None:
    late = LateGradients()
    late.called(Forward.WHOLE)
    late.touched()
    assert "the cause is not known" in str(late.warning())
    assert late.warning() is None


# A dense gradient of a sparse embedding is an error that names the embedding.


def penalise_a_whole_weight() -> tuple[str, list[float]]:
    torch.manual_seed(0)
    plan = nn.ModuleDict({"emb": nn.Embedding(6, 3, sparse=True), "head": nn.Linear(3, 1)})
    model: Any = fleet.distributed_model(_Model(plan))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    ids = torch.arange(4)
    model(ids).sum().backward()
    # without a reduction in this backward, torch's reducer expects no layout
    model.parts["emb"].weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    values = model.parts["emb"].weight.flatten().tolist()
    return error_text(
        PlanError, (model(ids).sum() + model.parts["emb"].weight.square().sum()).backward
    ), values


class _Model(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, ids: torch.Tensor) -> Any:
        return self.parts["head"](self.parts["emb"](ids))


@pytest.mark.multiprocess
def test_a_penalty_on_a_whole_sparse_weight_is_named() -> None:
    (text, values), other = run_workers(penalise_a_whole_weight)
    assert "parts.emb.weight got a dense gradient" in text
    assert "fleet.rows(parts.emb, ids)" in text
    assert "sparse=False" in text
    assert (text, values) == other


# Buffers of any layout are broadcast from worker 0, unless the strategy disables it.


def views(first: float) -> dict[str, Tensor]:
    return {
        "whole": torch.arange(4.0) + first,
        "expanded": (torch.arange(4.0) + first).expand(3, 4),
        "scalar": torch.tensor(first).expand(5),
        # as tutorials lay out positional encodings
        "permuted": (torch.arange(12.0) + first).view(1, 3, 4).transpose(0, 1),
        "both": (torch.arange(4.0) + first).expand(3, 4).t(),
        "overlapping": (torch.arange(6.0) + first).unfold(0, 3, 1),
        "sliced": (torch.arange(12.0) + first)[::2],
        "empty": torch.empty(0),
    }


def with_views(model: nn.Module, first: float) -> nn.Module:
    for name, view in views(first).items():
        model.register_buffer(name, view)
    return model


def buffers_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in model.named_buffers()}


def buffers_after_steps(shares: bool, folder: str) -> Any:
    strategy = fleet.DistributedStrategy(broadcast_buffers=shares)
    first = float(fleet.worker_index())
    model = fleet.distributed_model(with_views(nn.Linear(2, 1), first))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
    seen = []
    for step in range(2):
        # changed since the last forward
        model.get_buffer("whole").add_(100.0 * step * first)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        seen.append(buffers_of(model))
    fleet.save_persistables(folder)
    model.get_buffer("scalar")[:1].zero_()
    fleet.load_persistables(folder)
    return seen, buffers_of(model)


def expected(first: float) -> dict[str, list[float]]:
    return {name: view.flatten().tolist() for name, view in views(first).items()}


@pytest.mark.multiprocess
def test_all_workers_get_the_buffers_of_worker_0(tmp_path: Path) -> None:
    for seen, loaded in run_workers(buffers_after_steps, 2, True, str(tmp_path / "ckpt")):
        assert seen == [expected(0.0)] * 2
        assert loaded == expected(0.0)


@pytest.mark.multiprocess
def test_broadcast_buffers_false_keeps_local_buffers(tmp_path: Path) -> None:
    [zero, _], [one, _] = run_workers(buffers_after_steps, 2, False, str(tmp_path / "ckpt"))
    assert zero == [expected(0.0)] * 2
    assert one[0] == expected(1.0)
    assert one[1] == {**expected(1.0), "whole": [101.0, 102.0, 103.0, 104.0]}


@pytest.mark.parametrize("shares", [True, False])
def test_workers_of_servers_follow_broadcast_buffers(shares: bool) -> None:
    numbers = itertools.count()

    def build() -> Any:
        model = with_views(Net(), float(next(numbers)))
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def train(worker: Member) -> Any:
        return buffers_of(worker.model)

    zero, one = run(build, train, {"broadcast_buffers": shares})
    assert (zero == one) is shares


@pytest.mark.parametrize(
    ("buffer", "what"),
    [
        (torch.eye(3).to_sparse(), "of layout sparse_coo"),
        (torch.inference_mode()(torch.ones)(3), r"made under torch.inference_mode\(\)"),
    ],
)
def test_a_buffer_that_cannot_be_written_is_named(buffer: Tensor, what: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("mask", buffer)
    with pytest.raises(PlanError, match=rf"buffer 0.mask of the model is {what}, .*broadcast_buff"):
        check_buffers(model)


# Scaling gradients inside a model, independent of its inputs and outputs.


@dataclasses.dataclass
class TensorAndDict:
    plain: torch.Tensor
    given: dict[str, torch.Tensor]


def scaled(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    return weighted(layer, (x,), {}, factor), layer


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 3.0])
def test_only_gradients_inside_are_scaled(factor: float) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    (once, inside), (more, inside_more) = scaled(x, 1.0), scaled(x, factor)
    assert torch.equal(once, more)
    [plain] = torch.autograd.grad(once.square().sum(), x, retain_graph=True)
    [same] = torch.autograd.grad(more.square().sum(), x, retain_graph=True)
    # a weight of 0 passes no gradient to earlier models, whose weight is also 0
    torch.testing.assert_close(same, plain * (factor != 0.0))
    once.square().sum().backward()
    more.square().sum().backward()
    assert inside.weight.grad is not None
    torch.testing.assert_close(inside_more.weight.grad, factor * inside.weight.grad)


@pytest.mark.parametrize("value", ["argument", "keyword", "dataclass"])
def test_inputs_of_any_structure_are_supported(value: str) -> None:
    x = torch.randn(3, requires_grad=True)
    calls: dict[str, Any] = {
        "argument": ([x], {}),
        "keyword": ([], {"x": [x]}),
        "dataclass": ([TensorAndDict(torch.ones(3), {"x": x})], {}),
    }

    def forward(given: Any = None, x: Any = None) -> torch.Tensor:
        one = given.given["x"] if isinstance(given, TensorAndDict) else given if x is None else x[0]
        return torch.as_tensor(one * 2)

    weighted(forward, *calls[value], 4.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_inputs_and_outputs_may_be_changed_in_place() -> None:
    x = torch.ones(3, requires_grad=True)
    output = weighted(lambda a, b: (a.mul_(2), b.mul_(3)), (x * 1, x * 1), {}, 2.0)
    (output[0].add_(1) + output[1].add_(1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0] * 3
    through_sink((x * 1, x * 2))[1].add_(1).sum().backward()
    assert x.grad.tolist() == [7.0] * 3
