# SPDX-License-Identifier: Apache-2.0
"""Codecs: what they cover, how the strategy finds them, what each sends, and residuals."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fleetlight
from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.codecs.codec import (
    Codec,
    CodecSegment,
    Span,
    make_codec,
    narrow_type,
    narrowed,
)
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.error_feedback import ErrorFeedback
from fleetlight.collective.codecs.forms.int8 import Int8
from fleetlight.collective.codecs.forms.topk import TopK, sent_of
from fleetlight.errors import StrategyError
from fleetlight.strategy import CompressionConfigs
from fleetlight.strategy.features.reduction.compression import CODECS

NAMES = ["body.0.weight", "body.0.bias", "body.10.weight", "head.weight"]


def compression(*exclude: str, min_size: int = 1) -> Compression:
    return Compression(Int8(), min_size=min_size, exclude=exclude)


@pytest.mark.parametrize(
    ("shape", "is_covered"),
    [((), False), ((100,), False), ((3, 3), False), ((2, 5), True), ((1, 2, 5, 1), True)],
    ids=str,
)
def test_a_codec_covers_large_matrices(shape: tuple[int, ...], is_covered: bool) -> None:
    assert compression(min_size=10).covers("weight", torch.zeros(shape)) is is_covered


@pytest.mark.parametrize(
    ("excluded", "covered"),
    [
        ("body", ["head.weight"]),
        ("body.0.weight", ["body.10.weight", "head.weight"]),
        ("body.1", ["body.0.weight", "body.10.weight", "head.weight"]),
        ("weight", ["body.0.weight", "body.10.weight", "head.weight"]),
    ],
)
def test_modules_and_parameters_are_excluded_by_name(excluded: str, covered: list[str]) -> None:
    weights = [name for name in NAMES if name.endswith("weight")]
    found = compression(excluded)
    assert [name for name in weights if found.covers(name, torch.zeros(2, 2))] == covered


def test_unknown_names_are_refused() -> None:
    compression("body", "body.10", "head.weight", "body.0.bias").check(NAMES)
    with pytest.raises(StrategyError, match=r"no parameter or module 'body\.1'") as caught:
        compression("head", "body.1").check(NAMES)
    assert "body.0" in str(caught.value)
    assert "body.10" in str(caught.value)


def test_message_bytes_counts_values_and_scales() -> None:
    # one byte per value, and the scales of two blocks
    assert compression().message_bytes(300) == 308


def test_received_means_are_unchanged() -> None:
    found, mean = compression(), torch.ones(3)
    assert found.prepare()
    found.begin()
    found.receive({"body.0.weight": mean})
    found.correct({"body.0.weight": mean})
    assert mean.tolist() == [1, 1, 1]


# A codec is one file; the strategy, its effects and the workers find it.

#: sends the sign of each value and the mean magnitude
TOY = """
import torch

from fleetlight.collective.codecs.codec import CodecRecord


class Sign:
    name = "sign"
    divisible = False
    has_velocity = False

    def message_bytes(self, spans):
        return 4 + (spans[-1].stop if spans else 0)

    def encode(self, values, segment, message):
        residual = segment.residual
        if residual is not None:
            values = values + residual
        size = values.abs().mean()
        message[:4].view(torch.float32).copy_(size)
        message[4:].view(torch.int8).copy_(values.sign())
        if residual is not None:
            residual.copy_(values - size * values.sign())

    def add(self, message, spans, total):
        total.add_(message[4:].view(torch.int8) * message[:4].view(torch.float32))


def _make(configs):
    return Sign()


RECORD = CodecRecord("sign", _make)
"""

SCRIPT = """
import torch
import fleetlight as fleet

strategy = fleet.DistributedStrategy(
    compression="sign", shared_memory=False, compression_configs={"min_size": 1}
)
fleet.init(is_collective=True, strategy=strategy)
assert " * compression = 'sign': gradients cross between workers as sign" in strategy.explain()
model = fleet.distributed_model(torch.nn.Linear(4, 1, bias=False))
torch.nn.init.zeros_(model.weight)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
model((1 + fleet.worker_index()) * signs).sum().backward()
optimizer.step()
print("weight", model.weight.tolist())
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_workers_reduce_with_a_toy_codec(tmp_path: Path) -> None:
    package = tmp_path / "src" / "fleetlight"
    shutil.copytree(
        Path(fleetlight.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("__pycache__"),
        copy_function=os.symlink,
    )
    (package / "collective" / "codecs" / "forms" / "sign.py").write_text(TOY)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fleetlight.launch", "--nproc_per_node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONWARNINGS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    logs = [path.read_text() for path in sorted((tmp_path / "log").glob("workerlog.*"))]
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(logs)
    # the mean of signs of size 1 and 2, halved
    assert sum("weight [[-1.5, 1.5, -1.5, 1.5]]" in log for log in logs) == 2


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_has_the_name_of_its_file(name: str) -> None:
    codec: Codec = make_codec(name, CompressionConfigs())
    assert codec.name == name
    values = torch.randn(8)
    spans = [Span("weight", 0, 0, 8)]
    message = torch.zeros(codec.message_bytes(spans), dtype=torch.uint8)
    total = torch.zeros(8)
    codec.encode(values.clone(), CodecSegment(spans), message)
    codec.add(message, spans, total)
    largest = int(values.abs().argmax())
    torch.testing.assert_close(total[largest], values[largest], rtol=0.01, atol=0)


# Residuals belong to parameters, whichever bucket they are in.

A, B, C = ParameterSlice("a", 2), ParameterSlice("b", 3), ParameterSlice("c", 1)


def filled() -> ErrorFeedback:
    feedback = ErrorFeedback()
    feedback.of("owed", (A, B)).copy_(torch.arange(5.0))
    feedback.of("owed", (C,)).fill_(9)
    return feedback


def test_a_residual_starts_at_zero_and_changes_in_place() -> None:
    feedback = ErrorFeedback()
    assert feedback.of("owed", (A, B)).tolist() == [0] * 5
    feedback.of("owed", (A, B))[1] = 7
    assert feedback.of("owed", (A, B)).tolist() == [0, 7, 0, 0, 0]


def test_kinds_are_separate() -> None:
    feedback = filled()
    feedback.of("owed again", (A, B)).fill_(5)
    assert feedback.of("velocity", (A, B)).tolist() == [0] * 5
    assert feedback.of("owed", (A, B)).tolist() == [0, 1, 2, 3, 4]


def test_has_reports_the_stored_kinds() -> None:
    feedback = filled()
    assert feedback.has("owed")
    assert not feedback.has("velocity")
    feedback.load({"velocity/a": torch.ones(2)})
    assert not feedback.has("owed")
    assert feedback.has("velocity")


def test_a_residual_moves_with_its_parameter_to_other_buckets() -> None:
    feedback = filled()
    assert feedback.of("owed", (B, C, A)).tolist() == [2, 3, 4, 9, 0, 1]
    # a parameter outside the present buckets keeps its residual
    assert feedback.of("owed", (B,)).tolist() == [2, 3, 4]
    assert feedback.of("owed", (A,)).tolist() == [0, 1]
    assert feedback.of("owed", (A, B)).tolist() == [0, 1, 2, 3, 4]
    assert feedback.of("owed", (C,)).tolist() == [9]


def test_a_new_parameter_starts_at_zero_in_an_old_bucket() -> None:
    assert filled().of("owed", (A, ParameterSlice("new", 2), B)).tolist() == [0, 1, 0, 0, 2, 3, 4]


def test_state_is_keyed_by_kind_and_parameter() -> None:
    feedback = filled()
    feedback.of("velocity", (ParameterSlice("moved/a", 1),)).fill_(3)
    state = feedback.state()
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        "owed/a": [0, 1],
        "owed/b": [2, 3, 4],
        "owed/c": [9],
        "velocity/moved/a": [3],
    }
    feedback.of("owed", (C,)).fill_(1)
    assert state["owed/c"].tolist() == [9]


@pytest.mark.parametrize("again", [False, True], ids=["at_once", "behind_another_save"])
def test_a_loaded_residual_is_found_in_any_bucket(again: bool) -> None:
    state, feedback = filled().state(), ErrorFeedback()
    feedback.of("owed", (A, C)).fill_(5)
    feedback.of("velocity", (C,)).fill_(5)
    feedback.load(state)
    if again:
        feedback.load(feedback.state())
    state["owed/a"].fill_(8)
    assert feedback.of("owed", (C, A)).tolist() == [9, 0, 1]
    assert feedback.of("velocity", (C,)).tolist() == [0]
    assert feedback.state()["owed/b"].tolist() == [2, 3, 4]


def test_residuals_are_float32_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert ErrorFeedback().of("owed", (A,)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


# Narrow types: which tensors are narrowed, and which are unchanged.


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [
        (True, torch.float16),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        (False, None),
        ("none", None),
        ("int8", None),
    ],
)
def test_the_strategy_chooses_the_type(setting: bool | str, dtype: torch.dtype | None) -> None:
    assert narrow_type(setting) is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_values_are_narrowed(dtype: torch.dtype) -> None:
    for wide in (torch.float32, torch.float64):
        sent = narrowed(torch.tensor([1.0, 2.5], dtype=wide), dtype)
        assert sent.dtype is dtype
        assert sent.tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.int64),
        torch.eye(3).to_sparse(),
    ],
    ids=["narrow already", "complex", "whole numbers", "sparse"],
)
def test_tensors_without_a_narrower_form_are_unchanged(tensor: torch.Tensor) -> None:
    assert narrowed(tensor, torch.float16) is tensor


def test_without_a_narrow_type_tensors_are_unchanged() -> None:
    tensor = torch.ones(2)
    assert narrowed(tensor, None) is tensor


# Int8 messages: decoded values, residual and length.

CODEC = Int8()


def spans_of(count: int) -> tuple[Span, ...]:
    return (Span("a", 0, 0, count // 2), Span("b", 5, count // 2, count))


def values_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def encoded(values: Tensor, residual: Tensor | None = None) -> Tensor:
    """A message at the address of the second of two adjacent messages."""
    spans = spans_of(len(values))
    messages = torch.zeros(2, CODEC.message_bytes(spans), dtype=torch.uint8)
    CODEC.encode(values.clone(), CodecSegment(spans, residual), messages[1])
    return messages[1]


def decoded(message: Tensor, count: int) -> Tensor:
    total = torch.ones(count)
    CODEC.add(message, spans_of(count), total)
    return total - 1


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "length"), [(1, 8), (4, 8), (255, 260), (256, 260), (257, 268), (5000, 5080)]
)
def test_a_message_has_one_byte_per_value(count: int, length: int) -> None:
    assert CODEC.message_bytes(spans_of(count)) == length
    values = values_of(count)
    got = decoded(encoded(values), count)
    steps = values.abs().max() / 127
    torch.testing.assert_close(got, values, rtol=0, atol=float(0.51 * steps))
    assert CODEC.message_bytes(()) == 0


def test_the_residual_is_sent_later() -> None:
    residual, total = torch.zeros(700), torch.zeros(700)
    for step in range(5):
        total += decoded(encoded(values_of(700, step), residual), 700)
    expected = torch.stack([values_of(700, step) for step in range(5)]).sum(0)
    assert residual.abs().max() > 1e-3
    torch.testing.assert_close(total + residual, expected, rtol=0, atol=1e-5)


def test_messages_are_summed() -> None:
    one, other = (encoded(values_of(300, seed)) for seed in range(2))
    total = torch.zeros(300)
    for message in (one, other):
        CODEC.add(message, spans_of(300), total)
    torch.testing.assert_close(total, decoded(one, 300) + decoded(other, 300))


def test_a_nan_is_sent_and_leaves_the_residual() -> None:
    values, residual = values_of(600), values_of(600, 1)
    values[10] = float("nan")
    before = residual.clone()
    got = decoded(encoded(values, residual), 600)
    assert got.isnan().tolist() == [n < 256 for n in range(600)]
    assert torch.equal(residual[:256], before[:256])
    assert residual.isfinite().all()


# The largest values of each parameter are sent; the rest is the residual.

SPANS = (Span("a", 0, 0, 4), Span("b", 100, 4, 5), Span("c", 7, 5, 10))
VALUES = [1.0, -4, 2, 3, 0.1, 10, 20, -30, 40, 50]
#: half of each parameter, at least one value
HALF = [0, -4, 0, 3, 0.1, 0, 0, -30, 40, 50]


def round_trip(values: list[float], residual: Tensor | None, ratio: float = 0.5) -> Tensor:
    """Encodes the values and returns what decoding gives."""
    codec = TopK(ratio)
    messages = torch.zeros(3, codec.message_bytes(SPANS), dtype=torch.uint8)
    codec.encode(torch.tensor(values), CodecSegment(SPANS, residual), messages[1])
    total = torch.zeros(len(values))
    for message in messages[1:2]:
        codec.add(message, SPANS, total)
    return total


def test_each_parameter_sends_its_largest_values() -> None:
    assert round_trip(VALUES, None).tolist() == pytest.approx(HALF)
    assert TopK(0.5).message_bytes(SPANS) == 8 * (2 + 1 + 3)
    assert TopK(0.5).message_bytes(()) == 0


def test_the_residual_is_sent_once_it_has_grown() -> None:
    residual, total = torch.zeros(10), torch.zeros(10)
    total += round_trip(VALUES, residual)
    assert residual.tolist() == [1, 0, 2, 0, 0, 10, 20, 0, 0, 0]
    for _ in range(3):
        total += round_trip([1.0] * 10, residual)
    torch.testing.assert_close(total + residual, torch.tensor(VALUES) + 3)
    assert (total[[0, 2, 5, 6]] != 0).all()


def test_a_ratio_of_one_sends_everything() -> None:
    residual = torch.ones(10)
    assert round_trip(VALUES, residual, 1.0).tolist() == pytest.approx([v + 1 for v in VALUES])
    assert residual.tolist() == [0] * 10


@pytest.mark.parametrize(
    ("ratio", "count", "expected"),
    [(0.01, 1, 1), (0.01, 100, 1), (0.01, 101, 2), (1 - 0.999, 1_000_000, 1000), (1.0, 7, 7)],
)
def test_the_ratio_decides_how_many_values_are_sent(
    ratio: float, count: int, expected: int
) -> None:
    assert sent_of(Span("a", 3, 20, 20 + count), ratio) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_non_finite_values_are_sent_and_leave_no_residual(bad: float) -> None:
    residual = torch.full((10,), 5.0)
    got = round_trip([bad, bad, bad, 1.0, *VALUES[4:]], residual)
    assert got.isfinite().tolist() == [False] * 2 + [True] * 8
    assert residual.tolist() == [5] * 10
