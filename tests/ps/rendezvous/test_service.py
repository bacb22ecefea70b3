# SPDX-License-Identifier: Apache-2.0
"""Members meet, wait for each other, and learn who is missing or has failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from tests.ps.gates import called
from tests.ps.rendezvous.members import LIMIT_S, client_of, hello, listening, service_of

from fleetlight.errors import MembershipError, PeerError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.rendezvous.client import RendezvousClient
from fleetlight.ps.rendezvous.service import JobSize, RendezvousService, WithRendezvous
from fleetlight.ps.transport.channel import SocketChannel
from fleetlight.ps.transport.interface import Connection, MemoryChannel, Reply


def announced(client: RendezvousClient, server: int, port: int, incarnation: int = 0) -> int:
    """Announce a server on a connection that stays open."""
    channel = client.channel(LIMIT_S)
    reply = channel.call(m.Announce(server, incarnation, "10.0.0.1", port)).message
    assert isinstance(reply, m.Announced)
    return reply.incarnation


def test_workers_wait_for_each_other_and_for_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    point = service_of(workers=2, servers=2)
    size = (2, 2)
    workers = [client_of(point, f"w{n}", size=size) for n in range(2)]
    servers = [client_of(point, f"s{n}", hello("server"), size) for n in range(2)]
    with ThreadPoolExecutor(4) as pool:
        enrolled = list(pool.map(lambda one: one.enrol(), [*workers, *servers]))
        assert sorted(one.index for one in enrolled) == [0, 0, 1, 1]
        waits = called(point, "_wait", monkeypatch)
        first = pool.submit(workers[0].locate)
        assert waits.wait(LIMIT_S)
        assert announced(servers[0], 0, 7000) == 1
        assert not wait([first], 0.2).done
        announced(servers[1], 1, 7001)
        assert [entry.port for entry in first.result().servers] == [7000, 7001]
    assert point.has_formed


def test_missing_members_fail_the_job_at_the_deadline() -> None:
    point = service_of(workers=2, deadline_s=0.2)
    client = client_of(point, "w", size=(2, 1))
    with pytest.raises(MembershipError, match=r"1 of 2 workers joined within 0.2 s"):
        client.enrol()
    # it is the reply to all later requests, too
    with pytest.raises(MembershipError, match="1 of 2 workers joined"):
        client.locate()
    assert point.wait_for_end(0.0)


def test_a_server_that_never_announces_itself_is_named() -> None:
    point = service_of(servers=2, deadline_s=0.2)
    announced(client_of(point, "s", hello("server", 0), (1, 2)), 0, 7000)
    client_of(point, "t", hello("server", 1), (1, 2)).enrol()
    with pytest.raises(MembershipError, match=r"not announced within 0.2 s .*: server 1; did they"):
        client_of(point, "w", size=(1, 2)).locate()


def test_a_server_that_never_comes_is_missing_for_all() -> None:
    point = service_of(servers=2, deadline_s=0.2)
    announced(client_of(point, "s", hello("server", 0), (1, 2)), 0, 7000)
    with pytest.raises(MembershipError, match=r"1 of 2 servers joined within 0.2 s"):
        client_of(point, "w", size=(1, 2)).locate()


def test_the_first_failure_of_a_member_is_the_reply_to_all_others() -> None:
    point = service_of()
    client_of(point, "w").depart(0, "ValueError: on purpose")
    client_of(point, "s", hello("server")).depart(0, "a consequence")
    assert point.failure == "worker 0 failed: ValueError: on purpose"
    with pytest.raises(MembershipError, match="worker 0 failed: ValueError: on purpose"):
        client_of(point, "s", hello("server")).enrol()


def test_the_job_ends_when_all_servers_have_left() -> None:
    point = service_of(servers=2)
    for index in range(2):
        assert not point.wait_for_end(0.0)
        client_of(point, f"s{index}", hello("server", index), (1, 2)).depart(index)
    assert point.wait_for_end(0.0)
    assert not point.failure


@pytest.mark.parametrize(
    ("attend", "text"),
    [
        (m.Attend("job", 2, 1, "p", hello()), "has worker_num=2, but this job has worker_num=1"),
        (m.Attend("other", 1, 1, "p", hello()), "belongs to job other, but the rendezvous is"),
        (m.Attend("job", 1, 1, "p", hello("cook")), "a cook is no member of a job"),
    ],
)
def test_a_process_of_another_job_is_refused(attend: m.Attend, text: str) -> None:
    with pytest.raises(MembershipError, match=text):
        MemoryChannel(service_of()).call(attend)


def test_the_first_message_says_who_calls() -> None:
    with pytest.raises(ProtocolError, match="sent Locate first, expected Attend"):
        MemoryChannel(service_of()).call(m.Locate([]))


def test_a_surplus_worker_is_refused() -> None:
    point = service_of()
    client_of(point, "w").enrol()
    with pytest.raises(MembershipError, match="the job already has its 1 worker; end this process"):
        client_of(point, "other").enrol()


def test_servers_that_workers_cannot_reach_fail_the_job() -> None:
    point = service_of()
    client_of(point, "w", hello(address="10.0.0.9")).enrol()
    with pytest.raises(MembershipError, match="has an address that only its own machine can reach"):
        client_of(point, "s", hello("server", address="127.0.0.1")).enrol()


def test_a_server_takes_the_index_of_one_whose_process_has_ended() -> None:
    point = service_of()
    with listening(point) as listener:
        old = SocketChannel.connect(
            listener.address,
            "rendezvous",
            deadline_s=LIMIT_S,
            greeting=lambda: m.Attend("job", 1, 1, "old", hello("server")),
        )
        assert old.call(m.Announce(0, 0, "10.0.0.1", 7000)).message == m.Announced(1)
        successor = client_of(point, "new", hello("server", address="10.0.0.2"))
        with ThreadPoolExecutor(1) as pool:
            enrolled = pool.submit(successor.enrol)
            # a killed process closes its connections
            old.close()
            assert enrolled.result().index == 0
        assert announced(successor, 0, 8000) == 2
    worker = client_of(point, "w")
    assert [entry.port for entry in worker.locate().servers] == [8000]


def test_two_running_servers_of_one_index_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.rendezvous.service.OCCUPIED_S", 0.1)
    point = service_of()
    announced(client_of(point, "a", hello("server", 0)), 0, 7000)
    with pytest.raises(MembershipError, match=r"are two servers 0: one listens at 10.0.0.1:7"):
        announced(client_of(point, "b", hello("server", 0)), 0, 8000)


class _Server:
    """The other handler at the same address."""

    def __call__(self, connection: Connection, message: m.Message, arrays: object) -> Reply:
        return m.GoodbyeAck(), []

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """Nothing to forget."""


def test_a_server_may_keep_the_rendezvous() -> None:
    both = WithRendezvous(_Server(), service_of())
    member, worker = MemoryChannel(both), MemoryChannel(both)
    member.call(m.Attend("job", 1, 1, "p", hello()))
    assert isinstance(member.call(m.Enrol()).message, m.Enrolled)
    assert isinstance(worker.call(m.Heartbeat(0)).message, m.GoodbyeAck)
    member.close()
    worker.close()


def test_versions_are_compared() -> None:
    point = RendezvousService(JobSize("newer", "job", 1, 1), deadline_s=LIMIT_S)
    with pytest.raises(MembershipError, match="has version=test, but this job has version=newer"):
        client_of(point, "w").enrol()


def test_the_end_of_a_replaced_process_is_not_that_of_the_server() -> None:
    point = service_of()
    old = client_of(point, "old", hello("server", 0))
    announced(old, 0, 7000)
    point._directory.lose("old")
    assert announced(client_of(point, "new", hello("server", 0)), 0, 8000) == 2
    old.depart(0, "it is older than incarnation 2")
    old.depart(0)
    assert not point.failure
    assert not point.wait_for_end(0.0)


def test_a_worker_that_dies_while_it_waits_is_forgotten() -> None:
    point = service_of(workers=2)
    with listening(point) as listener:
        first = SocketChannel.connect(
            listener.address,
            "the rendezvous",
            deadline_s=LIMIT_S,
            greeting=lambda: m.Attend("job", 2, 1, "first", hello(index=0)),
        )
        first.send(m.Enrol())
        first.close()
        # its successor has the same index
        with ThreadPoolExecutor(2) as pool:
            again = [
                pool.submit(client_of(point, f"w{n}", hello(index=n), (2, 1)).enrol)
                for n in range(2)
            ]
            assert [one.result().index for one in again] == [0, 1]


def test_a_restarted_rendezvous_does_not_wait_for_workers_that_know_the_job() -> None:
    for message in (
        m.Announce(0, 3, "10.0.0.1", 7000),
        m.Locate([m.ServerEntry(0, 1, "s", "10.0.0.1", 7000)], waits=False),
    ):
        point = service_of()
        assert not point.has_formed
        client_of(point, "s", hello("server", 0)).channel(LIMIT_S).call(message)
        assert point.has_formed
