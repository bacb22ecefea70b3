# SPDX-License-Identifier: Apache-2.0
"""A worker joins while the job runs, by the requests that its process sends; servers restart."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.serving import Worker, ask, hello, of_all, open_up, plan, together

from fleetlight.errors import MembershipError, PeerLostError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.journal.journal import NEVER, Policy
from fleetlight.ps.server import membership
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.shard_queue import handler
from fleetlight.ps.transport.interface import Connection
from fleetlight.version import VERSION
from fleetlight.wire.control_signals import ControlSignal

STATE = b"the state of worker 0"
AGAIN = ask(turn=2, back=2, whole=[(32, 96)])


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_WAIT_S", 0.01)
    monkeypatch.setattr(membership, "_PRELUDE_S", 0.01)


class First(Worker):
    """A worker that starts with the job."""

    def greet(self, lane: str) -> m.Welcome:
        greeting = hello(self.index, lane, self.workers, self.server.index, self.servers)
        greeting = msgspec.structs.replace(greeting, worker_max=4)
        reply: m.Welcome = self.say(greeting, lane=lane)[0]
        return reply


class Joiner(Worker):
    """A worker with a place of a running job."""

    def greet(self, lane: str) -> m.Welcome:
        greeting = hello(self.index, lane, self.workers, self.server.index, self.servers)
        greeting = msgspec.structs.replace(greeting, joins=True, started_at=7, worker_max=4)
        reply: m.Welcome = self.say(greeting, lane=lane)[0]
        return reply


def elastic(mode: str = "async", index: int = 0, servers: int = 1) -> Server:
    server = Server(index, servers, 2, version="test", deadline_s=20.0, worker_max=4)
    open_up(server, plan(mode, server_num=servers))
    return server


def first_ones(server: Server) -> list[Worker]:
    return [First(server, index) for index in range(2)]


def begun(server: Server) -> list[Worker]:
    """Two workers that have met, and have a range each."""
    workers = first_ones(server)
    of_all(workers, lambda w: w.enter_barrier(1, "init_worker", w.index))
    for worker in workers:
        worker.say(ask())
    return workers


def admitted(workers: list[Worker], joiner: Worker, turn: int = 2, back: int = 2) -> None:
    """The workers finish their ranges, and the newcomer enters at the next turn."""
    assert joiner.say(m.Admit(0))[0] == m.Done()
    for worker in workers:
        worker.say(ask(1, (1, 0), waits=True))
    left = workers[0].say(ask(1, (1, 0), waits=True))[0].left
    assert left == [(32, 96)]
    again = ask(turn=turn, back=back, whole=left)
    assert workers[1].say(again)[0] == m.Held()
    assert workers[0].say(again)[0] == m.Held(wants_state=True)
    workers[0].say(m.OfferState(0, turn), np.frombuffer(STATE, np.uint8))
    reply, [state] = joiner.say(m.Admit(0))
    assert (reply, state.tobytes()) == (m.Admitted(turn), STATE)
    assert joiner.say(m.Enter(1, 0, turn))[0] == m.Entered(is_member=True)
    assert workers[1].say(again)[0] == m.Held()
    joiner.say(m.EnteredAll())
    assert workers[1].say(again)[0].start == 32


def place(server: Server, **facts: Any) -> Any:
    usual = {"fleetlight": "test", "torch": str(_torch()), "started_at": 7}
    return server(Connection("newcomer"), m.PlaceRequest(**{**usual, **facts}), [])[0]


def _torch() -> str:
    import torch

    return str(torch.__version__)


def test_a_newcomer_gets_a_place_the_prelude_and_a_turn() -> None:
    server = elastic()
    workers = begun(server)
    assert place(server).worker == 2
    assert place(server).worker == 2, "a repeated request gets the same place"
    assert place(server, started_at=8).worker == 3
    joiner = Joiner(server, 2)
    reply, arrays = joiner.say(m.PreludeRequest())
    assert (reply.operations, reply.counts) == (["init_worker"], [2])
    assert [array.tolist() for array in arrays] == [[0], [1]]
    admitted(workers, joiner)
    everyone = [*workers, joiner]
    values = of_all(everyone, lambda w: w.enter_barrier(2, "barrier", w.index))
    assert [[int(array[0]) for array in one] for one in values] == [[0, 1, 2]] * 3


def test_a_barrier_waits_for_a_newcomer_only_after_it_has_entered() -> None:
    server = elastic()
    workers = begun(server)
    Joiner(server, 2).say(m.Admit(0))
    values = of_all(workers, lambda w: w.enter_barrier(2, "barrier", w.index))
    assert [len(one) for one in values] == [2, 2]


def test_a_server_without_its_values_admits_no_newcomer() -> None:
    server = Server(0, 1, 2, version="test", deadline_s=20.0, worker_max=4)
    with pytest.raises(PeerLostError, match="is not ready for workers that join"):
        place(server)
    with pytest.raises(PeerLostError, match="is not ready for workers that join"):
        Joiner(server, 1)


def test_the_prelude_ends_with_the_first_lease() -> None:
    server = elastic()
    workers = first_ones(server)
    joiner = Joiner(server, 2)
    assert joiner.say(m.PreludeRequest())[0] == m.Done()
    of_all(workers, lambda w: w.enter_barrier(1, "init_worker"))
    assert joiner.say(m.PreludeRequest())[0] == m.Done()
    workers[0].say(ask())
    workers[1].say(ask())
    of_all(workers, lambda w: w.enter_barrier(2, "barrier"))
    assert joiner.say(m.PreludeRequest())[0].operations == ["init_worker"]


def test_sync_steps_wait_for_a_newcomer_from_its_phase_on() -> None:
    server = elastic("sync")
    workers = begun(server)
    joiner = Joiner(server, 2)
    for worker in workers:
        worker.say(m.EndPhase(0))
    admitted(workers, joiner)
    everyone = [*workers, joiner]
    of_all(everyone, lambda w: w.push(0, {0: ([1], [3.0])}, phase=1))
    assert workers[0].pull(0, [1]) == [-3.0]
    assert server.metrics().pushes == 1


def test_the_place_of_a_worker_that_left_is_free_again() -> None:
    server = elastic()
    workers = begun(server)
    workers[1].leave()
    assert {place(server, started_at=n).worker for n in (7, 8, 9)} == {1, 2, 3}
    with pytest.raises(MembershipError, match="all 4 places of the job are taken"):
        place(server, started_at=10)
    Joiner(server, 1).say(m.Admit(0))
    workers[0].say(ask(1, (1, 0), waits=True))
    left = workers[0].say(ask(1, (1, 0), waits=True))[0].left
    # the records of the worker that left are in it
    assert left == [(16, 96)]


def test_a_newcomer_that_dies_does_not_hold_the_turn() -> None:
    server = elastic()
    workers = begun(server)
    joiner = Joiner(server, 2)
    joiner.say(m.Admit(0))
    for worker in workers:
        worker.say(ask(1, (1, 0), waits=True))
    again = ask(turn=2, back=2, whole=[(32, 96)])
    assert workers[1].say(again)[0] == m.Held()
    for connection in joiner.greeted:
        server.gone(connection, None)
    server._membership._look()
    assert workers[1].say(again)[0].start == 32


def test_a_newcomer_that_was_lost_neither_waits_nor_enters() -> None:
    server = elastic()
    begun(server)
    joiner = Joiner(server, 2)
    joiner.say(m.Admit(0))
    for connection in joiner.greeted:
        server.gone(connection, None)
    server._membership._look()
    # requests of a process that has died may be handled late
    for late in (m.Admit(0), m.Enter(1, 0, 2)):
        with pytest.raises(MembershipError, match="has left the job or was lost"):
            joiner.say(late)
    assert server._membership.barriers.missing(2) == [0, 1]


def test_a_late_request_for_an_earlier_barrier_breaks_no_other_one() -> None:
    workers = begun(elastic())
    for number in (2, 3):
        together(*(lambda w=w, n=number: w.enter_barrier(n, "barrier") for w in workers))
    with pytest.raises(ProtocolError, match="worker 0 entered barrier 2, but barrier 3"):
        workers[0].enter_barrier(2, "barrier")
    of_all(workers, lambda w: w.enter_barrier(4, "barrier"))


def test_a_job_that_has_ended_says_so() -> None:
    server = elastic()
    workers = begun(server)
    joiner = Joiner(server, 2)
    for worker in workers:
        worker.leave()
    assert joiner.say(m.Admit(0))[0] == m.Admitted(0, is_over=True)
    joiner.leave()
    assert server.is_over


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"fleetlight": "9"}, "join with fleetlight 9, but this job runs test"),
        ({"torch": "1.0"}, "join with torch 1.0, but this job runs"),
    ],
)
def test_another_version_is_refused(facts: dict[str, Any], text: str) -> None:
    with pytest.raises(MembershipError, match=text):
        place(elastic(), **facts)


def test_server_0_alone_gives_places() -> None:
    with pytest.raises(MembershipError, match="give FLEET_JOIN the host:port of server 0"):
        place(elastic(index=1, servers=2))


def test_a_job_of_fixed_size_has_no_place() -> None:
    server = Server(0, 1, 2, version="test", deadline_s=20.0)
    open_up(server, plan("async"))
    with pytest.raises(MembershipError, match="this job keeps its 2 workers"):
        place(server)
    assert VERSION


def test_a_worker_beyond_the_first_ones_must_join() -> None:
    server = elastic()
    with pytest.raises(MembershipError, match="give a worker that joins later FLEET_JOIN"):
        First(server, 2)


def test_a_worker_that_knows_no_maximum_is_refused() -> None:
    with pytest.raises(MembershipError, match="expects worker_max=None, but this server has"):
        Worker(elastic(), 0)


class Restarting:
    """A server of an elastic job with a folder, from which it restarts."""

    def __init__(self, folder: Path, mode: str) -> None:
        self._folder, self._mode = folder, mode
        self.server = self._start()

    def _start(self) -> Server:
        server = Server(0, 1, 2, version="test", deadline_s=20.0, worker_max=4)
        durable = Durable(self._folder, job="a job", policy=Policy(sync=NEVER))
        open_up(server, plan(self._mode), durable)
        return server

    def restart(self, workers: list[Worker], *, snapshot: bool) -> None:
        durability = self.server._durability
        assert durability is not None
        if snapshot:
            assert durability.snapshot()
        durability._over.set()
        durability._snapshots.join()
        durability._folder._lock.release()
        self.server = self._start()
        for worker in workers:
            worker.server = self.server
            worker.greeted.clear()
            worker.lanes = {lane: Connection(lane) for lane in worker.lanes}
            for lane in worker.lanes:
                worker.greet(lane)

    def close(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.leave()
        self.server.close()


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_restarted_server_knows_who_takes_part(tmp_path: Path, mode: str, snapshot: bool) -> None:
    job = Restarting(tmp_path, mode)
    workers = begun(job.server)
    joiner = Joiner(job.server, 2)
    if mode == "sync":
        for worker in workers:
            worker.say(m.EndPhase(0))
    admitted(workers, joiner)
    everyone = [*workers, joiner]
    job.restart(everyone, snapshot=snapshot)
    of_all(everyone, lambda w: w.push(0, {0: ([1], [3.0])}, phase=1))
    assert workers[0].pull(0, [1]) == [-3.0 if mode == "sync" else -9.0]
    values = of_all(everyone, lambda w: w.enter_barrier(2, "barrier", w.index))
    assert [len(one) for one in values] == [3, 3, 3]
    assert joiner.say(m.PreludeRequest())[0].operations == ["init_worker"]
    job.close(everyone)


def with_a_newcomer_in_turn(server: Server) -> tuple[list[Worker], Joiner]:
    """Workers that ask for the second turn, and a newcomer who has the state of worker 0."""
    workers = begun(server)
    joiner = Joiner(server, 2)
    joiner.say(m.Admit(0))
    for worker in workers:
        worker.say(ask(1, (1, 0), waits=True))
    workers[0].say(AGAIN)
    workers[0].say(m.OfferState(0, 2), np.frombuffer(STATE, np.uint8))
    joiner.say(m.Admit(0))
    return workers, joiner


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_restart_holds_the_turn_until_all_servers_know_the_newcomer(
    tmp_path: Path, snapshot: bool
) -> None:
    job = Restarting(tmp_path, "sync")
    workers, joiner = with_a_newcomer_in_turn(job.server)
    joiner.say(m.Enter(1, 0, 2))
    job.restart([*workers, joiner], snapshot=snapshot)
    assert isinstance(workers[1].say(AGAIN)[0], m.Held)
    joiner.say(m.EnteredAll())
    assert workers[1].say(AGAIN)[0].start == 32
    job.close([*workers, joiner])


def test_a_newcomer_that_has_not_entered_asks_a_restarted_server_again(tmp_path: Path) -> None:
    job = Restarting(tmp_path, "async")
    workers, joiner = with_a_newcomer_in_turn(job.server)
    job.restart([*workers, joiner], snapshot=False)
    assert joiner.say(m.Enter(1, 0, 2))[0] == m.Entered(is_member=False)
    values = of_all(workers, lambda w: w.enter_barrier(2, "barrier", w.index))
    assert [len(one) for one in values] == [2, 2]
    job.close([*workers, joiner])


@pytest.mark.parametrize("snapshot", [False, True])
def test_barriers_after_a_restart_do_not_wait_for_a_newcomer_in_the_place_of_another(
    tmp_path: Path, snapshot: bool
) -> None:
    job = Restarting(tmp_path, "async")
    workers = begun(job.server)
    workers[1].leave()
    joiner = Joiner(job.server, 1)
    job.restart([workers[0], joiner], snapshot=snapshot)
    assert len(workers[0].enter_barrier(2, "barrier")) == 1
    job.close([workers[0], joiner])


def test_a_newcomer_that_was_refused_hides_no_stop_of_a_sync_job() -> None:
    """All workers of a step get the signal, without those that never took part."""
    server = elastic("sync")
    workers = begun(server)
    Joiner(server, 2).say(m.Leave("another plan"))
    workers[0].say(m.Heartbeat(0, ControlSignal(stop=True)))
    replies = of_all(workers, lambda w: w.push(0, {0: ([1], [3.0])}))
    assert [reply.call.stop for reply, _ in replies] == [True, True]


def test_a_push_before_the_join_is_refused() -> None:
    server = elastic()
    begun(server)
    with pytest.raises(MembershipError, match="made a step before it takes part"):
        Joiner(server, 2).push(0, {0: ([1], [3.0])})


def test_a_newcomer_ends_with_a_job_that_deals_out_nothing() -> None:
    server = elastic()
    workers = first_ones(server)
    joiner = Joiner(server, 2)
    assert joiner.say(m.PreludeRequest())[0] == m.Done()
    for worker in workers:
        worker.leave()
    assert joiner.say(m.PreludeRequest())[0] == m.Admitted(0, is_over=True)


def test_sync_jobs_cut_the_turn_of_a_worker_that_waits() -> None:
    assert elastic("sync")._membership.shard_queue.queue.cuts_for_waiting
    assert not elastic("async")._membership.shard_queue.queue.cuts_for_waiting


def test_replies_say_how_many_workers_train() -> None:
    server = elastic()
    workers = begun(server)
    assert workers[0].say(ask())[0].active == 2
    assert workers[0].say(m.Heartbeat(0))[0].here == 2
    joiner = Joiner(server, 2)
    assert workers[0].say(ask())[0].active == 2
    admitted(workers, joiner)
    assert workers[0].say(m.Heartbeat(0))[0].here == 3
