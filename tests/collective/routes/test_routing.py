# SPDX-License-Identifier: Apache-2.0
"""Workers of several hosts, simulated by loopback addresses, sum hierarchically."""

import logging
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.collective.routes.test_exchange import hellos
from tests.errors import error_text
from tests.workers import WorkerFailedError, run_processes, run_workers
from torch import nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight.collective.routes import local_peers
from fleetlight.collective.routes.levels import levels_of
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.routes.routing import crosses_a_link, senders, takes_levels
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess


def on(hosts: list[int], backend: str = "gloo") -> Any:
    """The part of a group that routing reads, with workers on numbered hosts."""
    return SimpleNamespace(hellos=hellos(hosts), size=len(hosts), backend=backend)


def test_one_worker_per_inner_group_sends() -> None:
    assert list(senders(on([0, 1, 0, 1]), None)) == [0, 1, 2, 3]
    assert list(senders(on([0, 1, 0, 1]), 0)) == [0, 1]
    assert list(senders(on([0, 0, 0]), 2)) == [0, 2]
    # without levels
    assert list(senders(on([0, 1]), 0)) == [0, 1]
    assert list(senders(on([0, 0]), 0)) == [0, 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_link_is_crossed_without_shared_memory(backend: str) -> None:
    assert crosses_a_link(on([0, 1], backend), True)
    assert crosses_a_link(on([0, 0], backend), False)
    assert not crosses_a_link(on([0, 0], backend), True)


def test_nccl_takes_levels_only_for_coded_gradients() -> None:
    levels = levels_of(hellos([0, 0, 1, 1]))
    assert takes_levels(on([0, 0, 1, 1]), levels)
    assert not takes_levels(on([0, 0, 1, 1], "nccl"), levels)
    assert takes_levels(on([0, 0, 1, 1], "nccl"), levels, coded=True)
    assert not takes_levels(on([0, 1], "nccl"), levels_of(hellos([0, 1])), coded=True)


#: alternating, so that adjacent workers are on different hosts
TWO_HOSTS, ONE_HOST = ["127.0.0.1", "127.0.0.2"] * 2, ["127.0.0.1"] * 4
SAMPLES = 24


def run_on(
    hosts: list[str], function: Callable[..., Any], *args: Any, deadline_s: float = 20.0
) -> Any:
    return run_processes(_on_host, [(h, function, args) for h in hosts], deadline_s=deadline_s)


def _on_host(host: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["FLEET_HOST"] = host
    fleet.init(is_collective=True)
    value = function(*args)
    fleet.stop_worker()
    return value


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (SAMPLES,), generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def steps(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    for step in range(6):
        optimizer.zero_grad()
        if step == 4:
            # the workers agree on the model again and reopen all routes
            model[0].weight.requires_grad_(False)  # type: ignore[index,operator]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def plain() -> torch.Tensor:
    model = network()
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), *data())
    return flat(model)


def replica() -> Any:
    found = current().models[0].replica
    assert found is not None
    return found


def prepared(settings: dict[str, Any]) -> tuple[nn.Module, Any, torch.Tensor, torch.Tensor]:
    strategy = fleet.DistributedStrategy(use_hierarchical_allreduce=True, **settings)
    model = fleet.distributed_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    x, y = (t.chunk(fleet.worker_num())[fleet.worker_index()] for t in data())
    return model, optimizer, x, y


def train(settings: dict[str, Any], forbidden: bool = False) -> Any:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    if forbidden and fleet.worker_index() == 3:
        local_peers._connect = refuse
    local_peers._CONNECT_S = 1.0 if forbidden else local_peers._CONNECT_S
    model, optimizer, x, y = prepared(settings)
    steps(model, optimizer, x, y)
    levels = [type(level).__name__ for level in replica().reducer._route._levels]
    log_lines = [text for text in records if text.startswith("hierarchical all_reduce: ")]
    return flat(model), levels, log_lines[:1]


def refuse(*_: Any) -> Any:
    raise OSError("not allowed here")


TWO_LEVELS = "hierarchical all_reduce: 2 groups of 2, then 2 leaders"


@pytest.mark.parametrize(
    ("hosts", "settings", "levels"),
    [
        (
            ["127.0.0.1"] * 3 + ["127.0.0.2"],
            {"hierarchical_allreduce_inter_nranks": 2},
            [["MemoryLevel"] * 2, ["MemoryLevel"], ["MemoryLevel"], []],
        ),
        (TWO_HOSTS, {"nccl_comm_num": 2, "fuse_all_reduce_ops": False}, [["MemoryLevel"]] * 4),
        (TWO_HOSTS, {"shared_memory": False}, [["GroupLevel"]] * 4),
        (
            ONE_HOST,
            {"hierarchical_allreduce_inter_nranks": 2, "sync_nccl_allreduce": True},
            [["MemoryLevel"]] * 4,
        ),
    ],
    ids=["three_levels", "memory", "process_groups", "one_host"],
)
def test_hierarchical_workers_equal_one_process(
    hosts: list[str], settings: dict[str, Any], levels: list[list[str]]
) -> None:
    results = run_on(hosts, train, settings)
    for end, _, _ in results:
        torch.testing.assert_close(end, plain(), rtol=0, atol=1e-12)
        assert torch.equal(end, results[0][0])
    assert [mine for _, mine, _ in results] == levels
    log_lines = [text for *_, text in results]
    if max(map(len, levels)) == 1:
        assert log_lines == [[TWO_LEVELS], [], [], []]


def test_values_between_hosts_may_be_narrow() -> None:
    results = run_on(TWO_HOSTS, train, {"fp16_allreduce": True})
    for end, levels, _ in results:
        assert torch.equal(end, results[0][0])
        torch.testing.assert_close(end, plain(), rtol=0, atol=1e-3)
        assert levels == ["MemoryLevel"]
    assert (results[0][0] - plain()).abs().max() > 1e-9


def test_one_failing_peer_makes_all_use_process_groups() -> None:
    for end, levels, _ in run_on(TWO_HOSTS, train, {}, True):
        torch.testing.assert_close(end, plain(), rtol=0, atol=1e-12)
        assert levels == ["GroupLevel"]


def train_two(settings: dict[str, Any]) -> Any:
    strategy = fleet.DistributedStrategy(use_hierarchical_allreduce=True, **settings)
    models = [fleet.distributed_model(network()) for _ in range(2)]
    parameters = [p for model in models for p in model.parameters()]
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(parameters, lr=0.1), strategy)
    x, y = (t.chunk(fleet.worker_num())[fleet.worker_index()] for t in data())
    used = set()
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            for model in models:
                model[0].bias.requires_grad_(False)
        # one backward fills the buckets of both models
        sum(F.cross_entropy(model(x), y) for model in models).backward()  # type: ignore[union-attr]
        optimizer.step()
        routes = [plan.replica.reducer._route for plan in current().models]
        groups = [{id(g) for g in (*r._plain._turns._groups, *_groups(r))} for r in routes]
        assert not groups[0] & groups[1]
        used |= groups[0] | groups[1]
    return [flat(model) for model in models], len(used)


def _groups(route: Any) -> list[Any]:
    return [level._group for level in route._levels if hasattr(level, "_group")]


def test_models_of_one_backward_use_separate_process_groups() -> None:
    results = run_on(TWO_HOSTS, train_two, {"shared_memory": False, "fuse_grad_size_in_num": 1})
    for (one, other), _ in results:
        assert torch.equal(one, other)
        assert torch.equal(one, results[0][0][0])
    # released groups are reused: those of a host, and those of the leaders
    assert [used for _, used in results] == [4, 4, 2, 2]


def train_with_another_rate() -> str:
    model, optimizer, x, y = prepared({})
    if fleet.worker_index() == 3:
        optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(fleet.errors.FleetError) as caught:
        steps(model, optimizer, x, y)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_divergence_is_detected_across_hosts() -> None:
    for text in run_on(TWO_HOSTS, train_with_another_rate):
        assert text.startswith("DivergedError: the workers no longer train alike: lr of group 0")
        assert "is 0.1 on worker 0, but 0.05 on worker 3" in text


def worker_3_ends(how: str) -> None:
    model, optimizer, x, y = prepared({})
    steps(model, optimizer, x, y)
    # its buckets are final after the second
    steps(model, optimizer, x, y)
    if fleet.worker_index() == 3:
        os.kill(os.getpid(), getattr(signal, how))
    try:
        steps(model, optimizer, x, y)
    finally:
        if how == "SIGSTOP" and fleet.worker_index() == 1:
            os.kill(current().group.hellos[3].pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "kind"), [("SIGKILL", "PeerLostError"), ("SIGSTOP", "DeadlineError")]
)
def test_a_lost_worker_is_an_error_on_every_host(how: str, kind: str) -> None:
    text = error_text(WorkerFailedError, run_on, TWO_HOSTS, worker_3_ends, how, deadline_s=4.0)
    assert "worker 3 died without a result" in text
    for index in range(3):
        assert f"worker {index}:\n" in text
    assert text.count("Error: all_reduce of the gradients at step 12 ") == 3
    assert f"{kind}: all_reduce of the gradients at step 12 " in text
    assert "worker 3 (pid" in text


# Local peers connect; if one cannot, all of them know.


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
