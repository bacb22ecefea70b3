# SPDX-License-Identifier: Apache-2.0
"""Steps of a single process."""

import pytest
import torch
from tests.static.nets import batch, captured, net

from fleetlight import static
from fleetlight.static.passes import GradientMerge


@pytest.mark.slow
def test_a_schedule_may_step_before_merged_gradients() -> None:
    """torch warns of schedules that step before their optimizer, and warnings are errors."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    program = captured(model, optimizer)
    program.passes = (GradientMerge(3, True),)
    static.Executor().run(program, batch(0))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
