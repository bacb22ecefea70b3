# SPDX-License-Identifier: Apache-2.0
"""Parameter servers on one host, workers on others."""

from typing import Any

import torch
from rig.hosts import hosts
from tests.rig.needed import NEEDED, run_on, serve_on
from torch import nn

import fleetlight as fleet
from fleetlight.collective.communication_cost import CommunicationCost

pytestmark = NEEDED

IDS = 40


def registered() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    table = fleet.distributed_model(fleet.nn.SparseEmbedding(4))
    return table, fleet.distributed_optimizer(torch.optim.Adagrad(table.parameters(), lr=0.1))


def serve() -> str:
    registered()
    fleet.init_server()
    fleet.run_server()
    return "served"


def train() -> Any:
    table, optimizer = registered()
    fleet.init_worker()
    ids = torch.arange(IDS).view(4, -1)
    for step in range(4):
        optimizer.zero_grad()
        table(ids[(step + fleet.worker_index()) % 4]).square().sum().backward()
        optimizer.step()
    fleet.barrier_worker()
    with torch.no_grad():
        rows = table(torch.arange(IDS)).tolist()
    who = (fleet.worker_index(), fleet.worker_num(), fleet.server_endpoints())
    fleet.stop_worker()
    return who, rows


def test_workers_train_with_servers_on_another_host() -> None:
    with hosts(3) as rig:
        *served, (who, rows), (others_who, others_rows) = serve_on(
            rig, (0, 0), (1, 2), serve, train
        )
        sent, reached = rig.hosts[0].sent(), rig.hosts[1].received()
    assert served == ["served", "served"]
    endpoints = ["10.213.7.1:6171", "10.213.7.1:6172"]
    assert who == (0, 2, endpoints)
    assert others_who == (1, 2, endpoints)
    assert rows == others_rows
    # all rows crossed the link at least once
    assert min(sent, reached) > IDS * 4 * 4


# -- the byte counts of a worker equal those of its network interface


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
