# SPDX-License-Identifier: Apache-2.0
"""DGC followed by the optimizer of torch moves parameters as the paper defines."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.collective.codecs.paper import Paper
from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice, flat_of, spread
from fleetlight.collective.codecs.codec import CodecSegment, Span
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.dgc import DGC, Momentum, Sparsity, to_gradient
from fleetlight.collective.routes.route_segments import SegmentPlace, SegmentStates
from fleetlight.errors import StrategyError

#: the end of a piece cuts the first parameter
SHAPES = {"a": (6, 7), "b": (5, 4)}
PIECES = (30, 32)
CUTS: dict[str, tuple[int, ...]] = {"a": (30,), "b": ()}
LR = 0.1


def parameters_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).requires_grad_() for n, s in shapes.items()}


def gradients_of(step: int, sender: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + sender)
    return {n: torch.randn(p.shape, generator=generator) for n, p in like.items()}


def momentum_of(name: str, like: dict[str, Tensor], optimizer: torch.optim.SGD) -> Momentum:
    [group] = optimizer.param_groups
    how = [group[field] for field in ("momentum", "nesterov", "weight_decay")]
    return Momentum(like[name], *how, optimizer.state[like[name]].get("momentum_buffer"))


class Job:
    """Several senders in one process, which share the parameters."""

    def __init__(
        self, senders: int, parameters: dict[str, Tensor], options: dict[str, Any], **how: Any
    ) -> None:
        self.parameters = parameters
        self.optimizer = torch.optim.SGD(parameters.values(), LR, **{"momentum": 0.9, **options})
        self.parts = tuple(ParameterSlice(name, p.numel()) for name, p in parameters.items())
        find = functools.partial(momentum_of, like=parameters, optimizer=self.optimizer)
        self.momentum_of = find
        self.codecs = [DGC(find, **how) for _ in range(senders)]
        self.feedbacks = [SegmentStates(Compression(codec)) for codec in self.codecs]
        for codec in self.codecs:
            codec.senders = senders

    def step(self, number: int, sparsity: float, *, begins: bool = False) -> None:
        """Encodes, sums, hands over, and lets torch step."""
        like = list(self.parameters.values())
        total = torch.zeros(sum(part.size for part in self.parts))
        for sender, (codec, segments) in enumerate(zip(self.codecs, self.feedbacks, strict=True)):
            codec.sparsity, codec.is_first = sparsity, begins
            mine = gradients_of(number, sender, self.parameters)
            flat = flat_of(list(mine.values()), like) / len(self.codecs)
            travel(codec, segments, flat, self.parts, total)
        movements = total.split([part.size for part in self.parts])
        for name, movement in zip(self.parameters, movements, strict=True):
            to_gradient(movement, self.momentum_of(name))
        grads = [torch.empty_like(parameter) for parameter in like]
        spread(total, grads, like)
        self._apply(grads)

    def dense_step(self, number: int) -> None:
        """A step with the dense mean."""
        each = [gradients_of(number, s, self.parameters) for s in range(len(self.codecs))]
        self._apply([torch.stack([mine[n] for mine in each]).mean(0) for n in self.parameters])

    def _apply(self, grads: Sequence[Tensor]) -> None:
        for parameter, grad in zip(self.parameters.values(), grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()


def travel(
    codec: DGC,
    segments: SegmentStates,
    flat: Tensor,
    parts: tuple[ParameterSlice, ...],
    total: Tensor,
) -> None:
    """Travels piece by piece, as `Hierarchy` cuts a bucket."""
    sizes = PIECES if sum(PIECES) == len(flat) else (len(flat),)
    place = SegmentPlace(parts)
    for values, sums in zip(flat.split(list(sizes)), total.split(list(sizes)), strict=True):
        segment = segments.at(place, len(values))
        message = torch.zeros(codec.message_bytes(segment.spans), dtype=torch.uint8)
        codec.encode(values, segment, message)
        codec.add(message, segment.spans, sums)
        place = place.after(len(values))


@dataclasses.dataclass
class JobAndPaper:
    """A job, and the reference of the paper for each parameter."""

    job: Job
    papers: dict[str, Paper]

    def step(self, number: int, sparsity: float) -> None:
        senders = range(len(self.job.codecs))
        each = [gradients_of(number, s, self.job.parameters) for s in senders]
        for name, paper in self.papers.items():
            mine = [grads[name].double().reshape(-1).numpy() / len(each) for grads in each]
            paper.step(np.array(mine), sparsity)

    def begin(self) -> None:
        for name, paper in self.papers.items():
            buffer = self.job.momentum_of(name).buffer
            assert buffer is not None
            paper.weight = self.job.parameters[name].detach().double().reshape(-1).numpy().copy()
            paper.begin(buffer.double().reshape(-1).numpy())

    def check(self) -> None:
        for name, paper in self.papers.items():
            mine = self.job.parameters[name].detach().reshape(-1)
            torch.testing.assert_close(mine.double(), torch.from_numpy(paper.weight), **TOLERANCE)


#: float32 error after a few steps
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def both(senders: int, clip: float | None, masking: bool, options: dict[str, Any]) -> JobAndPaper:
    parameters = parameters_of(SHAPES)
    weights = {n: p.detach().double().reshape(-1).numpy().copy() for n, p in parameters.items()}
    job = Job(senders, parameters, options, clip_norm=clip, factor_masking=masking)
    how: dict[str, Any] = {"lr": LR, "clip_norm": clip, "masking": masking, **options}
    return JobAndPaper(job, {n: Paper(w, senders, CUTS[n], **how) for n, w in weights.items()})


CASES: dict[str, tuple[int, float | None, bool, dict[str, Any]]] = {
    "all": (3, 1.5, False, {"nesterov": True, "weight_decay": 0.1}),
    "one_sender": (1, None, True, {}),
    "two": (2, None, True, {}),
    "unmasked": (2, None, False, {"momentum": 0.7}),
    "nesterov": (3, None, True, {"nesterov": True}),
    "decay": (2, None, True, {"weight_decay": 0.1}),
    "clipped": (2, 1.5, True, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_the_paper(case: str) -> None:
    pair = both(*CASES[case])
    for number, sparsity in enumerate([0.5, 0.5, 0.8, 0.9, 0.9, 0.9]):
        pair.job.step(number, sparsity)
        pair.step(number, sparsity)
        pair.check()


@pytest.mark.parametrize("case", ["two", "nesterov", "all"])
def test_momentum_continues_when_gradients_become_sparse(case: str) -> None:
    pair = both(*CASES[case])
    for number in range(3):
        pair.job.dense_step(number)
    pair.begin()
    for number in range(3, 7):
        pair.job.step(number, 0.8, begins=number == 3)
        pair.step(number, 0.8)
        pair.check()


PLAIN: dict[str, dict[str, Any]] = {
    "momentum": {},
    "nesterov": {"nesterov": True},
    "decay": {"weight_decay": 0.1},
    "both": {"nesterov": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("dense", [0, 2], ids=["from_the_start", "later"])
@pytest.mark.parametrize("options", PLAIN)
def test_sparsity_0_without_masking_is_plain_momentum(options: str, dense: int) -> None:
    jobs = [Job(2, parameters_of(SHAPES), PLAIN[options], factor_masking=False) for _ in range(2)]
    for number in range(6):
        jobs[0].dense_step(number)
        if number < dense:
            jobs[1].dense_step(number)
        else:
            jobs[1].step(number, 0.0, begins=number == dense)
    for name, parameter in jobs[0].parameters.items():
        torch.testing.assert_close(jobs[1].parameters[name], parameter, **TOLERANCE)


@pytest.mark.parametrize("loaded", [False, True], ids=["live", "loaded"])
def test_parameters_of_any_layout_are_supported(loaded: bool) -> None:
    jobs = []
    for masking in (True, False):
        pictures = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
        channels_last = pictures.to(memory_format=torch.channels_last).requires_grad_()
        jobs.append(
            Job(
                2,
                {"w": channels_last},
                {"weight_decay": 0.1, "nesterov": True},
                factor_masking=masking,
            )
        )
    for number in range(5):
        jobs[0].dense_step(number)
        if number < 2:
            jobs[1].dense_step(number)
        else:
            jobs[1].step(number, 0.0, begins=number == 2)
        state = jobs[1].optimizer.state[jobs[1].parameters["w"]]
        if loaded:
            state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    torch.testing.assert_close(jobs[0].parameters["w"], jobs[1].parameters["w"], **TOLERANCE)


def test_a_message_holds_only_the_largest_values() -> None:
    codec = DGC(lambda name: Momentum(torch.zeros(1)))
    spans = (Span("a", 0, 0, 1000), Span("b", 3, 1000, 1004))
    for sparsity, count in ((0.0, 1004), (0.5, 502), (0.9, 101), (0.999, 2)):
        codec.sparsity = sparsity
        assert codec.message_bytes(spans) == 8 * count


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_non_finite_values_are_sent_and_leave_no_state(bad: float) -> None:
    codec = DGC(lambda name: Momentum(torch.zeros(8), 0.9, weight_decay=1.0))
    codec.sparsity = 0.75
    residual, velocity = torch.arange(8.0), torch.ones(8)
    segment = CodecSegment((Span("a", 0, 0, 8),), residual, velocity)
    message = torch.zeros(codec.message_bytes(segment.spans), dtype=torch.uint8)
    codec.encode(torch.tensor([1, 2, bad, bad, bad, 6, 7, 8]), segment, message)
    total = torch.zeros(8)
    codec.add(message, segment.spans, total)
    assert total.isfinite().tolist() == [True, True, False, False, True, True, True, True]
    assert residual.tolist() == list(range(8))
    assert velocity.tolist() == [1] * 8


def test_a_parameter_without_steps_has_no_momentum() -> None:
    movement = torch.tensor([1.0, 2])
    to_gradient(movement, Momentum(torch.ones(2)))
    assert movement.tolist() == [1, 2]


def test_a_movement_may_have_the_parameters_shape() -> None:
    parameter = torch.randn(3, 2).t().requires_grad_()
    momentum = Momentum(parameter, 0.9, True, 0.1, torch.randn(2, 3))
    shaped = torch.randn(2, 3)
    flat = shaped.t().reshape(-1).clone()
    to_gradient(shaped, momentum)
    to_gradient(flat, momentum)
    torch.testing.assert_close(flat, shaped.t().reshape(-1))


# The sparsity of each step.


@pytest.mark.parametrize(
    ("begin", "steps", "levels", "expected"),
    [
        (0, 1, [0.9], [0.9, 0.9, 0.9]),
        (2, 1, [0.9], [None, None, 0.9, 0.9]),
        (0, 1, [0.5, 0.9], [0.5, 0.9, 0.9]),
        (1, 4, [0.5, 0.9], [None, 0.5, 0.5, 0.9, 0.9, 0.9]),
        (0, 5, [0.0, 0.5, 0.9], [0.0, 0.0, 0.5, 0.5, 0.9, 0.9]),
        (0, 2, [0.1, 0.2, 0.3, 0.4], [0.1, 0.3, 0.4]),
    ],
    ids=["at_once", "later", "two", "two_later", "uneven", "more_than_steps"],
)
def test_sparsity_rises_through_the_levels(
    begin: int, steps: int, levels: list[float], expected: list[float | None]
) -> None:
    sparsity = Sparsity(begin, steps, levels)
    assert [sparsity.at(step) for step in range(len(expected))] == expected
    assert sparsity.at(10**6) == levels[-1]


@pytest.mark.parametrize("levels", [[], [0.9, 0.5], [-0.1], [0.5, 1.0], [float("nan")]], ids=str)
def test_levels_must_rise_from_0_to_below_1(levels: list[float]) -> None:
    with pytest.raises(StrategyError, match=r"dgc_configs\.sparsity: got \[.*expected at least"):
        Sparsity(0, 1, levels)
