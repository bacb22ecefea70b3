# SPDX-License-Identifier: Apache-2.0
"""The account of a worker between hosts: what an interface has sent at a step."""

from __future__ import annotations

import torch
from rig.hosts import hosts
from tests.rig.needed import NEEDED, run_on

import fleetlight as fleet
from fleetlight.collective.communication_cost import CommunicationCost

pytestmark = NEEDED

STEPS, SIDE = 12, 500


def trained() -> CommunicationCost:
    model = fleet.distributed_model(torch.nn.Linear(SIDE, SIDE, bias=False))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, SIDE)).sum().backward()
        optimizer.step()
    return fleet.account()


def test_bytes_of_a_step_are_those_that_the_interface_has_sent() -> None:
    with hosts(2) as rig:
        figures = run_on(rig, [0, 1], trained)
        sent = [host.sent() for host in rig.hosts]
    for number, found in enumerate(figures):
        assert found.interface == f"cable{number}"
        assert found.steps == STEPS - 1
        # of two hosts each sends the gradients once, and a little around them; of the last ones
        # some may have been on their way when the step was over here
        steps = (found.sent_bytes or 0) / (4 * SIDE * SIDE)
        assert found.steps - 1 < steps < 1.2 * found.steps
        assert (found.sent_bytes or 0) < sent[number]
        assert 0 < found.waited_s < found.seconds
