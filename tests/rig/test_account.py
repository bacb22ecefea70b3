# SPDX-License-Identifier: Apache-2.0
"""The byte counts of a worker equal those of its network interface."""

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


def test_bytes_of_a_step_equal_those_of_the_interface() -> None:
    with hosts(2) as rig:
        costs = run_on(rig, [0, 1], trained)
        sent = [host.sent() for host in rig.hosts]
    for number, found in enumerate(costs):
        assert found.interface == f"cable{number}"
        assert found.steps == STEPS - 1
        # each of two hosts sends the gradients once, with a small overhead; some of the last
        # bytes may be in flight when the step ends on this host
        steps = (found.sent_bytes or 0) / (4 * SIDE * SIDE)
        assert found.steps - 1 < steps < 1.2 * found.steps
        assert (found.sent_bytes or 0) < sent[number]
        assert 0 < found.waited_s < found.seconds
