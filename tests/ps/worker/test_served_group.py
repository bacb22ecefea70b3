# SPDX-License-Identifier: Apache-2.0
"""What workers do together over server 0: the same words as a group's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ps.serving import closed_server, together

from fleetlight.errors import (
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    StoppedError,
)
from fleetlight.ps import messages as m
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.interface import MemoryChannel
from fleetlight.ps.worker import served_group as group_module
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.served_group import ServedGroup

LIMIT_S = 20.0


def crews(workers: int, deadline_s: float = 20.0) -> tuple[Server, list[ServedGroup]]:
    server = closed_server(workers, deadline_s)

    def member(index: int) -> ServedGroup:
        def connect(lane: str) -> list[Any]:
            channel = MemoryChannel(server)
            channel.call(m.Greeting("test", index, workers, 0, 1, 1, lane))
            return [channel]

        return ServedGroup(Client(index, workers, 1, connect), deadline_s)

    return server, [member(index) for index in range(workers)]


def all_do(act: Callable[[ServedGroup], Any], workers: int = 3) -> list[Any]:
    """What `act` answers in each of the workers."""
    _, members = crews(workers)
    answers = together(*[lambda crew=crew: act(crew) for crew in members])
    for crew in members:
        crew.leave()
    return answers


def test_bytes_and_tensors_are_gathered_in_order() -> None:
    gathered = all_do(lambda c: c.gather_bytes(b"x" * c.index, "names"))
    assert gathered == [[b"", b"x", b"xx"]] * 3
    first = all_do(lambda c: c.bytes_to_first(b"x" * c.index, "names"))
    assert first == [[b"", b"x", b"xx"], [], []]
    tensors = all_do(lambda c: c.all_gather(torch.tensor([[c.index, 7]])))
    assert [[t.tolist() for t in each] for each in tensors] == [[[[0, 7]], [[1, 7]], [[2, 7]]]] * 3
    empty = all_do(lambda c: c.all_gather(torch.empty(0, 4)))
    assert [tuple(t.shape) for t in empty[1]] == [(0, 4)] * 3


@pytest.mark.parametrize(("op", "expected"), [("sum", 3), ("max", 2), ("min", 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_are_reduced_in_place(op: str, expected: int, dtype: torch.dtype) -> None:
    for tensor in all_do(lambda c: c.all_reduce(torch.tensor([c.index], dtype=dtype), op)):
        assert tensor.dtype == dtype
        assert tensor.tolist() == [expected]


def test_an_unknown_reduction() -> None:
    with pytest.raises(ConfigError, match="got op='mean', expected one of sum, max, min"):
        crews(1)[1][0].all_reduce(torch.ones(1), "mean")


def test_values_of_worker_0_go_to_all() -> None:
    def act(crew: ServedGroup) -> Any:
        tensors = [torch.full((2, 2), crew.index, dtype=torch.bfloat16), torch.tensor(crew.index)]
        crew.broadcast(tensors, "buffers")
        return [t.float().sum().item() for t in tensors], crew.broadcast_bytes(
            str(crew.index).encode(), "names"
        )

    assert all_do(act) == [([0.0, 0.0], b"0")] * 3


def test_a_failure_of_one_is_one_of_all() -> None:
    def act(crew: ServedGroup) -> str:
        def fail() -> None:
            raise ConfigError("no such folder")

        try:
            crew.together(fail if crew.index == 1 else None, "save")
        except ConfigError as error:
            return str(error)
        return "nothing was told"

    zero, one, two = all_do(act)
    assert one == "no such folder"
    assert zero == two
    assert "no such folder" in zero
    assert "on worker 1" in zero
    assert all_do(lambda crew: crew.together(None, "save")) == [None] * 3


def test_different_calls_are_an_error_that_names_both() -> None:
    def act(crew: ServedGroup) -> Any:
        crew.barrier() if crew.index == 0 else crew.assemble("save_persistables")

    for error in all_do(act, 2):
        assert isinstance(error, ProtocolError)
        assert "barrier" in str(error)
        assert "save_persistables" in str(error)


def test_who_does_not_come_is_named_when_the_deadline_is_over() -> None:
    _, [zero, one] = crews(2, deadline_s=0.2)
    with pytest.raises(DeadlineError, match=r"epoch waited 0\.2 s for worker 1"):
        zero.barrier("epoch")
    for crew in (zero, one):
        crew.fail("over")


def test_who_waits_for_one_that_stops_does_what_is_to_be_done_then() -> None:
    _, [zero, one] = crews(2)
    done: list[str] = []
    zero.when_left_alone = lambda error: done.append(type(error).__name__)
    one.client.signals.stops = True
    one.client.heartbeat(0)
    with pytest.raises(StoppedError, match="barrier would wait for worker 1, which stops"):
        zero.barrier()
    assert done == ["StoppedError"]
    for crew in (zero, one):
        crew.fail("over")


def test_the_others_learn_why_a_worker_failed() -> None:
    _, [zero, one] = crews(2)
    waits = threading.Thread(target=one.fail, args=("KeyError: 'x'",))
    waits.start()
    with pytest.raises(PeerLostError, match="worker 1 failed: KeyError: 'x'"):
        zero.barrier()
    waits.join()
    zero.fail("")


def test_the_others_learn_of_a_connection_that_is_lost() -> None:
    _, [zero, one] = crews(2)
    lost = threading.Thread(target=one.client.close)
    lost.start()
    with pytest.raises(PeerLostError, match="worker 1"):
        zero.barrier()
    lost.join()
    zero.fail("")


def test_one_worker_alone_asks_nobody() -> None:
    server, [crew] = crews(1)
    server.close("nobody is to ask")
    assert crew.alone
    assert crew.gather_bytes(b"a", "names") == [b"a"]
    tensor = torch.ones(2)
    assert crew.all_gather(tensor)[0] is not tensor
    assert crew.all_reduce(tensor) is tensor
    crew.broadcast([tensor], "buffers")
    crew.barrier()
    assert copy.deepcopy(crew) is crew
    crew.fail("")


def test_signs_of_life_go_on_while_a_meeting_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that have no part in the meeting hear nothing else."""
    monkeypatch.setattr("fleetlight.ps.worker.served_group._HEARTBEAT_S", 0.001)
    server, [zero, one] = crews(2)
    heard, meets = threading.Event(), threading.Event()
    enter, at_step = server._membership.barriers.enter, server._presence.at_step

    def note(*of: Any) -> None:
        meets.set()
        enter(*of)

    def listen(worker: int, step: int) -> None:
        at_step(worker, step)
        if worker == 0 and meets.is_set():
            heard.set()

    monkeypatch.setattr(server._membership.barriers, "enter", note)
    monkeypatch.setattr(server._presence, "at_step", listen)
    waits = threading.Thread(target=zero.barrier)
    waits.start()
    assert meets.wait(20)
    heard.clear()
    assert heard.wait(20)
    one.barrier()
    waits.join()
    for crew in (zero, one):
        crew.leave()


def test_signs_of_life_carry_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.worker.served_group._HEARTBEAT_S", 0.001)
    server, [crew] = crews(1)
    heard = threading.Event()
    at_step = server._presence.at_step

    def listen(worker: int, step: int) -> None:
        at_step(worker, step)
        if step == 5:
            heard.set()

    monkeypatch.setattr(server._presence, "at_step", listen)
    crew.step = 5
    assert heard.wait(20)
    crew.leave()
    crew._heartbeats.join(20)
    assert not crew._heartbeats.is_alive()


@pytest.mark.parametrize("restarts", [True, False])
def test_signs_of_life_go_on_while_a_server_may_come_back(
    restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_HEARTBEAT_S", 0.01)
    begin, late = threading.Event(), threading.Event()
    _, [crew] = crews(1)
    if restarts:
        crew.client.expect_restarts(LIMIT_S)
    tries: list[int] = []

    def beat(client: Client, step: int) -> None:
        if begin.is_set():
            tries.append(step)
            if len(tries) > 1:
                late.set()
            raise DeadlineError("server 0 was silent for 0.5 s")

    monkeypatch.setattr(Client, "heartbeat", beat)
    begin.set()
    if restarts:
        assert late.wait(LIMIT_S)
        # nobody is there to hear it, and nobody will be
        crew.client.close()
    crew._heartbeats.join(LIMIT_S)
    assert not crew._heartbeats.is_alive()
    assert (len(tries) > 1) == restarts
