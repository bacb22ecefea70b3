# SPDX-License-Identifier: Apache-2.0
"""ServedGroup: collective operations of workers over server 0."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ps.serving import closed_server, together

from fleetlight.errors import ConfigError, DeadlineError, PeerLostError, ProtocolError, StoppedError
from fleetlight.ps import messages as m
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.interface import MemoryChannel
from fleetlight.ps.worker import served_group
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.served_group import ServedGroup

LIMIT_S = 20.0


def groups_of(workers: int, deadline_s: float = 20.0) -> tuple[Server, list[ServedGroup]]:
    server = closed_server(workers, deadline_s)

    def member(index: int) -> ServedGroup:
        def connect(lane: str) -> list[Any]:
            channel = MemoryChannel(server)
            channel.call(m.Greeting("test", index, workers, 0, 1, 1, lane))
            return [channel]

        return ServedGroup(Client(index, workers, 1, connect), deadline_s)

    return server, [member(index) for index in range(workers)]


def in_all_workers(operation: Callable[[ServedGroup], Any], workers: int = 3) -> list[Any]:
    """The result of `operation` in each worker."""
    _, members = groups_of(workers)
    results = together(*[lambda group=group: operation(group) for group in members])
    for group in members:
        group.leave()
    return results


def test_bytes_and_tensors_are_gathered_in_order() -> None:
    gathered = in_all_workers(lambda c: c.gather_bytes(b"x" * c.index, "names"))
    assert gathered == [[b"", b"x", b"xx"]] * 3
    first = in_all_workers(lambda c: c.bytes_to_first(b"x" * c.index, "names"))
    assert first == [[b"", b"x", b"xx"], [], []]
    tensors = in_all_workers(lambda c: c.all_gather(torch.tensor([[c.index, 7]])))
    assert [[t.tolist() for t in tensors] for tensors in tensors] == [
        [[[0, 7]], [[1, 7]], [[2, 7]]]
    ] * 3
    empty = in_all_workers(lambda c: c.all_gather(torch.empty(0, 4)))
    assert [tuple(t.shape) for t in empty[1]] == [(0, 4)] * 3


@pytest.mark.parametrize(("op", "expected"), [("sum", 3), ("max", 2), ("min", 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_are_reduced_in_place(op: str, expected: int, dtype: torch.dtype) -> None:
    for tensor in in_all_workers(lambda c: c.all_reduce(torch.tensor([c.index], dtype=dtype), op)):
        assert tensor.dtype == dtype
        assert tensor.tolist() == [expected]


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ConfigError, match="got op='mean', expected one of sum, max, min"):
        groups_of(1)[1][0].all_reduce(torch.ones(1), "mean")


def test_broadcast_sends_the_values_of_worker_0() -> None:
    def operation(group: ServedGroup) -> Any:
        tensors = [torch.full((2, 2), group.index, dtype=torch.bfloat16), torch.tensor(group.index)]
        group.broadcast(tensors, "buffers")
        return [t.float().sum().item() for t in tensors], group.broadcast_bytes(
            str(group.index).encode(), "names"
        )

    assert in_all_workers(operation) == [([0.0, 0.0], b"0")] * 3


def test_a_failure_of_one_worker_is_raised_on_all() -> None:
    def operation(group: ServedGroup) -> str:
        def fail() -> None:
            raise ConfigError("no such folder")

        try:
            group.together(fail if group.index == 1 else None, "save")
        except ConfigError as error:
            return str(error)
        return "no error"

    zero, one, two = in_all_workers(operation)
    assert one == "no such folder"
    assert zero == two
    assert "no such folder" in zero
    assert "on worker 1" in zero
    assert in_all_workers(lambda group: group.together(None, "save")) == [None] * 3


def test_different_calls_are_an_error_that_names_both() -> None:
    def operation(group: ServedGroup) -> Any:
        group.barrier() if group.index == 0 else group.assemble("save_persistables")

    for error in in_all_workers(operation, 2):
        assert isinstance(error, ProtocolError)
        assert "barrier" in str(error)
        assert "save_persistables" in str(error)


def test_a_barrier_timeout_names_the_missing_worker() -> None:
    _, [zero, one] = groups_of(2, deadline_s=0.2)
    with pytest.raises(DeadlineError, match=r"epoch waited 0\.2 s for worker 1"):
        zero.barrier("epoch")
    for group in (zero, one):
        group.fail("over")


def test_a_worker_left_alone_by_a_stop_calls_its_hook() -> None:
    _, [zero, one] = groups_of(2)
    done: list[str] = []
    zero.when_left_alone = lambda error: done.append(type(error).__name__)
    one.client.signals.stops = True
    one.client.heartbeat(0)
    with pytest.raises(StoppedError, match="barrier would wait for worker 1, which stops"):
        zero.barrier()
    assert done == ["StoppedError"]
    for group in (zero, one):
        group.fail("over")


def test_other_workers_receive_the_reason_of_a_failure() -> None:
    _, [zero, one] = groups_of(2)
    waiting = threading.Thread(target=one.fail, args=("KeyError: 'x'",))
    waiting.start()
    with pytest.raises(PeerLostError, match="worker 1 failed: KeyError: 'x'"):
        zero.barrier()
    waiting.join()
    zero.fail("")


def test_other_workers_learn_of_a_lost_connection() -> None:
    _, [zero, one] = groups_of(2)
    lost = threading.Thread(target=one.client.close)
    lost.start()
    with pytest.raises(PeerLostError, match="worker 1"):
        zero.barrier()
    lost.join()
    zero.fail("")


def test_a_single_worker_sends_no_request() -> None:
    server, [group] = groups_of(1)
    server.close("no request expected")
    assert group.alone
    assert group.gather_bytes(b"a", "names") == [b"a"]
    tensor = torch.ones(2)
    assert group.all_gather(tensor)[0] is not tensor
    assert group.all_reduce(tensor) is tensor
    group.broadcast([tensor], "buffers")
    group.barrier()
    assert copy.deepcopy(group) is group
    group.fail("")


def test_heartbeats_continue_during_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that take no part in the barrier receive nothing else."""
    monkeypatch.setattr("fleetlight.ps.worker.served_group._HEARTBEAT_S", 0.001)
    server, [zero, one] = groups_of(2)
    received, in_barrier = threading.Event(), threading.Event()
    enter, at_step = server._membership.barriers.enter, server._presence.at_step

    def notify(*of: Any) -> None:
        in_barrier.set()
        enter(*of)

    def receive(worker: int, step: int) -> None:
        at_step(worker, step)
        if worker == 0 and in_barrier.is_set():
            received.set()

    monkeypatch.setattr(server._membership.barriers, "enter", notify)
    monkeypatch.setattr(server._presence, "at_step", receive)
    waiting = threading.Thread(target=zero.barrier)
    waiting.start()
    assert in_barrier.wait(20)
    received.clear()
    assert received.wait(20)
    one.barrier()
    waiting.join()
    for group in (zero, one):
        group.leave()


def test_heartbeats_carry_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.worker.served_group._HEARTBEAT_S", 0.001)
    server, [group] = groups_of(1)
    received = threading.Event()
    at_step = server._presence.at_step

    def receive(worker: int, step: int) -> None:
        at_step(worker, step)
        if step == 5:
            received.set()

    monkeypatch.setattr(server._presence, "at_step", receive)
    group.step = 5
    assert received.wait(20)
    group.leave()
    group._heartbeats.join(20)
    assert not group._heartbeats.is_alive()


@pytest.mark.parametrize("restarts", [True, False])
def test_heartbeats_continue_while_a_server_may_restart(
    restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_group, "_HEARTBEAT_S", 0.01)
    started, repeated = threading.Event(), threading.Event()
    _, [group] = groups_of(1)
    if restarts:
        group.client.expect_restarts(LIMIT_S)
    attempts: list[int] = []

    def beat(client: Client, step: int) -> None:
        if started.is_set():
            attempts.append(step)
            if len(attempts) > 1:
                repeated.set()
            raise DeadlineError("server 0 was silent for 0.5 s")

    monkeypatch.setattr(Client, "heartbeat", beat)
    started.set()
    if restarts:
        assert repeated.wait(LIMIT_S)
        # no server will return
        group.client.close()
    group._heartbeats.join(LIMIT_S)
    assert not group._heartbeats.is_alive()
    assert (len(attempts) > 1) == restarts
