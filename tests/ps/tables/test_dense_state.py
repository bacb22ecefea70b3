# SPDX-License-Identifier: Apache-2.0
"""Dense state moves between servers without a changed bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.ps.servers import DenseServers
from tests.ps.tables.test_dense import (
    OTHERS,
    Make,
    parameters,
    set_gradients,
    trained_plainly,
    two_groups,
)
from torch import nn

from fleetlight.errors import CheckpointError
from fleetlight.ps.messages import FetchedDense, Message
from fleetlight.ps.plan import GEO
from fleetlight.ps.tables.dense_state import ELEMENTS, ODD, DenseState, PieceState, part, whole


def sent(state: DenseState) -> DenseState:
    """As it arrives on the other side."""
    message = FetchedDense(state.state, state.scalars)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message)
    return DenseState(state.values, arrived.state, arrived.scalars, state.arrays)


def moved(old: DenseServers, make: Make, servers: int) -> DenseServers:
    """The same training on other servers."""
    params = parameters()
    new = DenseServers(params, [make(params)], servers)
    kept = whole(old.plan, old.placement, [sent(server.state()) for server in old.servers])
    for number, server in enumerate(new.servers):
        server.restore(sent(part(new.plan, new.placement, number, kept)))
    return new


def train(dense: DenseServers, steps: Sequence[int]) -> None:
    for step in steps:
        set_gradients(dense.parameters, step)
        dense.step()


@pytest.mark.parametrize("name", ["AdamW", *OTHERS])
def test_training_continues_with_another_number_of_servers(name: str) -> None:
    make = {"AdamW": two_groups, **OTHERS}[name]
    params = parameters()
    first = DenseServers(params, [make(params)], 2)
    train(first, range(2))
    second = moved(first, make, 3)
    train(second, range(2, 4))
    third = moved(second, make, 1)
    train(third, range(4, 6))
    third.take()
    for ours, plain in zip(third.parameters, trained_plainly(make, 6), strict=True):
        assert torch.equal(ours, plain)


def test_the_full_state_is_by_parameter() -> None:
    params = parameters()
    dense = DenseServers(params, [torch.optim.Adam(params, 0.1)], 3)
    set_gradients(params, 1)  # none for the first one
    dense.step()
    kept = whole(dense.plan, dense.placement, [server.state() for server in dense.servers])
    dense.take()
    for number, param in enumerate(params):
        assert np.array_equal(kept.values[number], param.detach().numpy().reshape(-1))
    assert kept.state[0] == PieceState({}, {})
    assert set(kept.state[1].tensors) == {"step", "exp_avg", "exp_avg_sq"}
    kind, average = kept.state[1].tensors["exp_avg"]
    assert params[1].grad is not None
    assert kind == ELEMENTS
    np.testing.assert_allclose(average, params[1].grad.reshape(-1) * 0.1, rtol=1e-5)
    kind, step = kept.state[1].tensors["step"]
    assert (kind, step.shape, float(step)) == (ODD, (), 1.0)


def test_state_of_geo_continues_in_other_modes() -> None:
    """There is no state of optimizers then: what they begin with stays."""
    params = parameters()
    geo = DenseServers(params, [OTHERS["Adagrad"](params)], 2, GEO)
    dense = DenseServers(params, [OTHERS["Adagrad"](params)], 3)
    kept = whole(geo.plan, geo.placement, [server.state() for server in geo.servers])
    for number, server in enumerate(dense.servers):
        server.restore(part(dense.plan, dense.placement, number, kept))
    train(dense, range(3))
    dense.take()
    for ours, plain in zip(params, trained_plainly(OTHERS["Adagrad"], 3), strict=True):
        assert torch.equal(ours, plain)


def test_numbers_keep_their_type() -> None:
    params = parameters()
    dense = DenseServers(params, [OTHERS["own"](params)], 1)
    train(dense, range(2))
    (server,) = dense.servers
    steps = [scalars["steps"] for scalars in sent(server.state()).scalars]
    assert steps == [1, 2, 2, 2]
    assert {type(step) for step in steps} == {int}


def test_bfloat16_state_keeps_its_bits() -> None:
    tensor = torch.randn(6).bfloat16()
    (state,) = [PieceState.of({"buffer": tensor.view(2, 3), "odd": tensor[:1]}, (2, 3), "p")]
    live = state.live((2, 3))
    assert live["buffer"].dtype is torch.bfloat16
    assert torch.equal(live["buffer"], tensor.view(2, 3))
    assert torch.equal(live["odd"], tensor[:1])


def test_state_is_a_copy() -> None:
    params = parameters()
    dense = DenseServers(params, [torch.optim.SGD(params, 0.1, momentum=0.9)], 1)
    train(dense, range(1))
    state = dense.servers[0].state()
    before = [array.copy() for array in (*state.values, *state.arrays)]
    train(dense, range(1, 3))
    for array, copy in zip((*state.values, *state.arrays), before, strict=True):
        assert np.array_equal(array, copy)


def test_state_that_cannot_be_sent_is_named() -> None:
    class Listing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["history"] = [1, 2]

    params = [nn.Parameter(torch.ones(2))]
    dense = DenseServers(params, [Listing(params)], 1)
    params[0].grad = torch.ones(2)
    dense.step()
    with pytest.raises(CheckpointError, match=r"keeps a list in 'history' of 'p0'"):
        dense.servers[0].state()


def test_entries_without_a_piece_are_refused() -> None:
    state = DenseState([], [(2, "exp_avg", ELEMENTS)], [{}, {}], [np.zeros(1)])
    with pytest.raises(CheckpointError, match="got 'exp_avg' of piece 2, but only 2 pieces"):
        state.pieces()


def test_mismatched_state_is_refused_before_any_is_loaded() -> None:
    servers = DenseServers(params := parameters(), [two_groups(params)], 1)
    train(servers, range(1))
    whole_state = servers.servers[0].state()
    before = [array.copy() for array in whole_state.values]
    missing = DenseState(
        [np.zeros_like(array) for array in whole_state.values],
        whole_state.state,
        whole_state.scalars,
        whole_state.arrays[:-1],
    )
    short = DenseState(
        missing.values,
        whole_state.state,
        whole_state.scalars,
        [array[:0] if array.size > 1 else array for array in whole_state.arrays],
    )
    first = (-1, *whole_state.state[0][1:])
    nowhere = DenseState(
        missing.values, [first, *whole_state.state[1:]], whole_state.scalars, whole_state.arrays
    )
    for state, why in ((missing, "tensors, expected"), (short, "elements"), (nowhere, "piece -1")):
        with pytest.raises(CheckpointError, match=why):
            servers.servers[0].restore(state)
        for now, then in zip(servers.servers[0].values(), before, strict=True):
            np.testing.assert_array_equal(now, then)
