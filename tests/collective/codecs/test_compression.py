# SPDX-License-Identifier: Apache-2.0
"""Which parameters a codec covers."""

import pytest
import torch

from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.forms.int8 import Int8
from fleetlight.errors import StrategyError

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
