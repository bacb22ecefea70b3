# SPDX-License-Identifier: Apache-2.0
"""The collector waits while programs are made, and goes on as it was before."""

from __future__ import annotations

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


def test_it_goes_on_behind_the_block_also_after_an_error() -> None:
    with no_gc():
        assert not gc.isenabled()
        with no_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError), no_gc():
        raise RuntimeError
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    with no_gc():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_it_waits_for_a_capture() -> None:
    seen = []

    def loss(output: Tensor, _: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        return output.sum()

    model = nn.Linear(8, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    static.capture(model, loss, optimizer, batch(0))
    assert seen == [False]
    assert gc.isenabled()
