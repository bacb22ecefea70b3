# SPDX-License-Identifier: Apache-2.0
"""Garbage collection pauses while programs are written, and is restored after."""

import gc
from collections.abc import Iterator

import pytest
import torch
from tests.static.nets import batch
from torch import Tensor, nn

from fleetlight import static
from fleetlight.static.writing.source import no_gc


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_collection_resumes_after_the_block_and_after_an_error() -> None:
    with no_gc():
        assert not gc.isenabled()
        with no_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError), no_gc():
        raise RuntimeError
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    with no_gc():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_capture_pauses_collection() -> None:
    seen = []

    def loss(output: Tensor, _: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        return output.sum()

    model = nn.Linear(8, 3).double()
    static.capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    assert seen == [False]
    assert gc.isenabled()
