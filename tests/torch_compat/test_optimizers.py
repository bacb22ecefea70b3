# SPDX-License-Identifier: Apache-2.0
"""How optimizers of torch record their schedulers and scalers."""

import torch

from fleetlight.torch_compat.optimizers import has_scheduler, is_scaled_by


def test_a_scheduler_of_an_optimizer_is_detected() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    assert not has_scheduler(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert has_scheduler(optimizer)


def test_the_scaler_of_a_step_is_detected() -> None:
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(one.param_groups[0]["params"][0].sum()).backward()
    scaler.step(one)
    assert (is_scaled_by(scaler, one), is_scaled_by(scaler, other)) == (True, False)
