# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table accumulates as torch would, for every use of backward."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.rows import DIM, Kept, dense, handle
from torch import Tensor, nn

from fleetlight.errors import PlanError
from fleetlight.ps.layers import grad_accumulation
from fleetlight.ps.layers.lookup import embed
from fleetlight.ps.layers.table_gradient import TableGradient


def weight() -> nn.Parameter:
    return nn.Parameter(torch.empty(0, DIM))


def looked_up(table: Tensor, *ids: int) -> Tensor:
    return embed(table, handle(Kept()).visit(np.array(ids), True), None, None).sum()


def rows(table: nn.Parameter) -> dict[int, float]:
    found = dense(table)
    return {int(i): float(found[i][0]) for i in np.flatnonzero(found.any(1))}


@pytest.fixture(params=["laid down", "left to torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test with the direct addition and with torch's own accumulation."""
    if request.param == "left to torch":
        monkeypatch.setattr(grad_accumulation, "_would_only_add", lambda *_: False)


def test_gradients_of_several_backwards_add_up() -> None:
    table = weight()
    looked_up(table, 1, 2).backward()
    looked_up(table, 2, 3).backward()
    assert rows(table) == {1: 1, 2: 2, 3: 1}
    (looked_up(table, 5) + looked_up(table, 5) + looked_up(table, 1)).backward()
    assert rows(table) == {1: 2, 2: 2, 3: 1, 5: 2}


def test_retained_graph_accumulates_twice() -> None:
    table = weight()
    out = looked_up(table, 1)
    out.backward(retain_graph=True)
    out.backward()
    assert rows(table) == {1: 2}


def test_autograd_grad_returns_the_gradient_without_accumulating() -> None:
    table = weight()
    [returned] = torch.autograd.grad(looked_up(table, 1, 1), table)
    assert table.grad is None
    assert isinstance(returned, TableGradient)
    assert [part.ids.tolist() for part in returned.parts] == [[1]]
    other = torch.ones((), requires_grad=True)
    (looked_up(table, 1) * other).backward(inputs=[other])
    assert table.grad is None
    assert other.grad is not None
    (looked_up(table, 1) * other).backward(inputs=[table])
    assert rows(table) == {1: 1}


def test_weight_frozen_after_the_forward_gets_no_gradient() -> None:
    table, other = weight(), torch.ones((), requires_grad=True)
    out = looked_up(table, 1) * other
    table.requires_grad_(False)
    out.backward()
    assert table.grad is None
    assert other.grad is not None


def test_second_derivative_of_a_table_is_refused() -> None:
    table, x = weight(), torch.tensor(2.0, requires_grad=True)
    with pytest.raises(PlanError, match="whose rows are on the servers"):
        (looked_up(table, 1) * x * x).backward(create_graph=True)


def test_gradient_hooks_of_the_weight_are_called() -> None:
    table, seen = weight(), []
    handles: list[Any] = [
        table.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    ]
    handles.append(table.register_post_accumulate_grad_hook(lambda it: seen.append(it)))
    looked_up(table, 1).backward()
    assert isinstance(seen[0], TableGradient)
    assert seen[1] is table
    assert rows(table) == {1: 2}
    for hook in handles:
        hook.remove()
    looked_up(table, 1).backward()
    assert (len(seen), rows(table)) == (2, {1: 3})


def test_clone_of_a_weight_passes_the_gradient_on() -> None:
    table = weight()
    looked_up(table.clone(), 1).backward()
    assert rows(table) == {1: 1}


def test_gradients_of_concurrent_backwards_add_up() -> None:
    table = weight()
    barrier = threading.Barrier(4)

    def train() -> None:
        losses = [looked_up(table, 1, 2) for _ in range(50)]
        barrier.wait(10)
        for loss in losses:
            loss.backward()

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows(table) == {1: 200, 2: 200}
