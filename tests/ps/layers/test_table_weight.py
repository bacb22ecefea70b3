# SPDX-License-Identifier: Apache-2.0
"""The weight of a table refuses computation, but works with torch's tools for Parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils

from fleetlight.errors import PlanError
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.layers.table_weight import TableWeight, stand_for


def net() -> nn.Module:
    module = nn.Module()
    module.emb, module.out = SparseEmbedding(4, table="users"), nn.Linear(4, 1)
    return module


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.square().sum(),
        lambda w: 2 * w,
        lambda w: F.linear(torch.ones(2, 4), w),
        lambda w: F.embedding(torch.tensor([0]), w),
        lambda w: torch.norm(w),
        lambda w: torch.ones(2, 4) @ w.T,
        lambda w: w[3],
        lambda w: list(w),
        lambda w: w.data.normal_(),
        lambda w: w.detach().sum(),
        lambda w: w.copy_(torch.ones(())),
        lambda w: setattr(w, "data", torch.ones(5, 4)),
        nn.init.xavier_uniform_,
        nn.init.zeros_,
        lambda w: torch._foreach_norm([w]),
        lambda w: w.clone().mul_(0.9),
        lambda w: w.numpy(),
        lambda w: w.as_subclass(torch.Tensor),
        lambda w: nn.Parameter(w.detach()).sum(),
    ],
)
def test_computation_is_refused_with_the_table_and_advice(use: Callable[[Any], Any]) -> None:
    with pytest.raises(PlanError, match=r"(?s)users: .*weight_decay.*fleet\.rows\(layer, ids\)"):
        use(net().emb.weight)


def test_stand_for_converts_a_parameter_in_place() -> None:
    weight = nn.Parameter(torch.ones(5, 4))
    assert stand_for(weight, "emb") is weight
    assert isinstance(weight, TableWeight)
    assert tuple(weight.shape) == (0, 4)
    assert "emb" in repr(weight)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_optimizers_and_modules_accept_a_table_weight(kind: Any) -> None:
    module = net()
    optimizer = kind(module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    module.out(torch.ones(1, 4)).sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
    module.double().to(torch.float32).requires_grad_(False).requires_grad_(True)
    assert sum(p.numel() for p in module.parameters()) == 5
    assert isinstance(module.emb.weight, TableWeight)


def test_deepcopy_and_torch_save_keep_the_class() -> None:
    module, file = net(), io.BytesIO()
    assert isinstance(copy.deepcopy(module).emb.weight, TableWeight)
    torch.save(module, file)
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=False).emb.weight, TableWeight)


def test_state_dict_loads_without_fleetlight_classes() -> None:
    module, file = net(), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert type(state["emb.weight"]) is torch.Tensor
    module.load_state_dict(state)


def _assigned() -> nn.Module:
    module = net()
    module.load_state_dict(net().state_dict(), assign=True)
    return module


def _swapped() -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return net().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("made", [lambda: net().to("meta"), _assigned, _swapped])
def test_replaced_parameters_are_table_weights_too(made: Callable[[], Any]) -> None:
    for module in (made(), copy.deepcopy(made())):
        weight = module.emb.weight
        assert isinstance(weight, TableWeight)
        assert weight.requires_grad
        assert next(name for name, _ in module.named_parameters()) == "emb.weight"
        with pytest.raises(PlanError, match="users"):
            weight.sum()


def _by_hand(module: Any) -> None:
    averages = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        averages[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)


def _averaged(**options: Any) -> Callable[[Any], None]:
    def average(module: Any) -> None:
        averaged = swa_utils.AveragedModel(module, **options)
        averaged.update_parameters(module)
        averaged.update_parameters(module)

    return average


@pytest.mark.parametrize(
    "average", [_by_hand, _averaged(), _averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99))]
)
def test_average_over_a_table_is_refused_with_advice(average: Callable[[Any], None]) -> None:
    with pytest.raises(PlanError, match=r"leave tables out.*p\.numel\(\).*AveragedModel\("):
        average(net())


def test_average_that_omits_tables_works() -> None:
    _averaged(avg_fn=lambda a, p, n: torch.lerp(a, p, 0.01) if a.numel() else a)(net())
