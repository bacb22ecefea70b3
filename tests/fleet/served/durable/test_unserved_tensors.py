# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model that no server keeps, also after a script replaces some."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fleetlight.fleet.served.elastic.unserved_tensors import UnservedTensors


def made() -> nn.Sequential:
    """A model whose linear layer is on the servers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.PReLU()))
    for parameter in model[1].parameters():
        parameter.requires_grad = False
    return model


OWN = {
    *("0.1.weight", "0.1.bias", "0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked"),
    "0.2.0.weight",
}


def of(own: UnservedTensors, model: nn.Module) -> dict[str, torch.Tensor]:
    return own.tensors([model], list(model[0].parameters()))  # type: ignore[index]


def test_served_tensors_are_excluded() -> None:
    assert of(UnservedTensors(), made()).keys() == OWN


def test_values_are_current() -> None:
    own, model = UnservedTensors(), made()
    of(own, model)
    model(torch.randn(4, 2))
    model[1].weight.data = torch.full((2,), 7.0)
    found = of(own, model)
    assert found["0.1.num_batches_tracked"] == 1
    assert found["0.1.weight"].tolist() == [7, 7]
    assert not any(tensor.requires_grad for tensor in found.values())


def replace_a_buffer(model: nn.Sequential) -> set[str]:
    model[1].running_mean = torch.full((2,), 7.0)
    return OWN


def replace_a_parameter(model: nn.Sequential) -> set[str]:
    model[2][0].weight = nn.Parameter(torch.full((1,), 7.0))  # type: ignore[index]
    return OWN


def replace_a_module(model: nn.Sequential) -> set[str]:
    model[2][0] = nn.Linear(1, 1)  # type: ignore[operator]
    nn.init.constant_(model[2][0].weight, 7.0)  # type: ignore[index, arg-type]
    return OWN | {"0.2.0.bias"}


def add_a_buffer(model: nn.Sequential) -> set[str]:
    model[2].register_buffer("seen", torch.full((2,), 7.0))
    return OWN | {"0.2.seen"}


def add_a_module(model: nn.Sequential) -> set[str]:
    model[2].append(nn.PReLU(init=7.0))  # type: ignore[operator]
    return OWN | {"0.2.1.weight"}


def empty_a_buffer(model: nn.Sequential) -> set[str]:
    model[1].running_mean.data = torch.empty(0)
    model[1].running_var.fill_(7.0)
    return OWN - {"0.1.running_mean"}


@pytest.mark.parametrize(
    "change",
    [
        *(replace_a_buffer, replace_a_parameter, replace_a_module),
        *(add_a_buffer, add_a_module, empty_a_buffer),
    ],
)
def test_changes_by_a_script_are_found(change: Callable[[nn.Sequential], set[str]]) -> None:
    own, model = UnservedTensors(), made()
    before = of(own, model)
    assert not any(bool((tensor == 7.0).any()) for tensor in before.values())
    expected = change(model)
    now = of(own, model)
    assert now.keys() == expected
    assert any(bool((tensor == 7.0).any()) for tensor in now.values())


def test_another_model_and_other_served_parameters_are_found() -> None:
    own, model = UnservedTensors(), made()
    of(own, model)
    assert of(own, made()).keys() == OWN
    both = own.tensors([model, made()], list(model[0].parameters()))
    assert both.keys() >= {"0.1.weight", "1.0.weight", "1.1.weight"}
    assert own.tensors([model], list(model.parameters())).keys() == {
        name for name in OWN if "running" in name or "tracked" in name
    }
