# SPDX-License-Identifier: Apache-2.0
"""Local peers connect; if one cannot, all of them know."""

from typing import Any

import pytest
import torch
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight.collective.routes import local_peers
from fleetlight.collective.routes.route import Bucket
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess


def shared(fails_on: int | None) -> Any:
    if fails_on == fleet.worker_index():
        # like a sandbox that forbids Unix sockets
        local_peers._connect = refuse
    memory = local_peers.shared_memory_of(current().group)
    if memory is None:
        return None
    tensor = torch.tensor([1.0 + fleet.worker_index()])
    memory.start(Bucket(0, tensor))
    memory.finish()
    memory.close()
    return float(tensor)


def refuse(*_: Any) -> Any:
    raise OSError("not allowed here")


def test_three_peers_share_memory() -> None:
    assert run_workers(shared, 3, None) == [6.0, 6.0, 6.0]


def test_one_failing_peer_disables_shared_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_peers, "_CONNECT_S", 1.0)
    assert run_workers(shared, 2, 0) == [None, None]


def which_route(shared_memory: bool) -> str:
    strategy = fleet.DistributedStrategy(shared_memory=shared_memory)
    model = fleet.distributed_model(torch.nn.Linear(2, 2))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
    fleet.init_worker()
    replica = current().models[0].replica
    assert replica is not None
    return type(replica.reducer._route).__name__


def test_the_strategy_chooses_the_route() -> None:
    assert run_workers(which_route, 2, True) == ["SharedMemory"] * 2
    assert run_workers(which_route, 2, False) == ["ProcessGroups"] * 2
