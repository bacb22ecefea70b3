# SPDX-License-Identifier: Apache-2.0
"""Programs that compute the same have one fingerprint; of others the first difference is told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.static.nets import accuracy, batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.static.graph.fingerprint import entries, fingerprint, first_difference

pytestmark = pytest.mark.slow

ALONE = """
import torch
from tests.static.nets import captured, net
from fleetlight.static.graph.fingerprint import fingerprint
# tensors that came before give torch's sizes other names
captured(net(), None)
model = net()
print(fingerprint(captured(model, torch.optim.SGD(model.parameters(), lr=0.5)).form))
"""


def made(lr: float = 0.5, **options: Any) -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=lr, **options))


def told(one: static.Program, other: static.Program) -> str:
    difference = first_difference(entries(one.form), entries(other.form), 1)
    assert (difference is None) == (fingerprint(one.form) == fingerprint(other.form))
    return difference or ""


def test_it_is_the_same_in_another_process() -> None:
    found = subprocess.run(
        [sys.executable, "-c", ALONE], check=True, capture_output=True, text=True, timeout=100
    )
    assert found.stdout.strip() == fingerprint(made().form)


def test_values_and_sizes_of_a_batch_are_no_difference() -> None:
    model, loss = net(), nn.functional.cross_entropy
    with torch.no_grad():
        model[0].weight.add_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = static.capture(model, loss, optimizer, batch(3), {"accuracy": accuracy})
    assert told(made(), other) == ""


class Product(nn.Module):
    def __init__(self, times: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.times(self.linear(x))
        return out


def product(times: Any, name: str = "output") -> static.Program:
    return static.capture(Product(times), None, None, {"x": torch.ones(2, 4)}, {name: torch.sum})


def test_the_first_other_operation_is_named() -> None:
    assert told(product(torch.sin), product(torch.cos)) == (
        "operation 2: sin on worker 0, cos on worker 1"
    )


def test_other_numbers_of_an_operation_are_told_with_it() -> None:
    difference = told(product(lambda x: x * 2.0), product(lambda x: x * 2.5))
    assert difference == (
        "operation 2: aten.mul.Tensor(%4, 2.0) in forward: float32[batch, 4] on worker 0, "
        "aten.mul.Tensor(%4, 2.5) in forward: float32[batch, 4] on worker 1"
    )


def test_a_longer_program_has_what_the_other_has_not() -> None:
    zero = entries(product(torch.sin).form)
    assert first_difference(zero, [*zero, ("fetch more", "value 3")], 2) == (
        "fetch more: value 3 on worker 2, nothing on worker 0"
    )
    assert first_difference([*zero, ("fetch more", "value 3")], zero, 2) == (
        "fetch more: value 3 on worker 0, nothing on worker 2"
    )


@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"weight_decay": 0.1}])
def test_another_optimizer_is_a_difference(options: dict[str, float]) -> None:
    assert told(made(), made(**options))


def test_names_of_fetches_count() -> None:
    assert "fetch" in told(product(torch.sin, "total"), product(torch.sin, "sum"))


def test_devices_of_workers_may_have_other_numbers() -> None:
    """Each worker has a GPU of its own."""
    texts = []
    for device in ("cuda:0", "cuda:1"):
        program = product(lambda x: x + torch.zeros(4, device="cpu"))
        graph, _ = program.form.copied()
        for node in graph.nodes:
            if node.op == "call_function":
                node.kwargs = {**node.kwargs, "device": torch.device(device)}
        texts.append(entries(program.form.rewritten(graph, "moved")))
    assert texts[0] == texts[1]
