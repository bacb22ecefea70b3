# SPDX-License-Identifier: Apache-2.0
"""The rendezvous service: who is in the job, and where."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from tests.ps.gates import called
from tests.ps.rendezvous.members import LIMIT_S, VERSION, client_of, hello, listening, service_of
from tests.workers import reserved_port

from fleetlight.errors import MembershipError, PeerError, ProtocolError
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.messages import Announce, ServerEntry
from fleetlight.ps.rendezvous.client import RendezvousClient
from fleetlight.ps.rendezvous.directory import SILENCE_S, Directory, OccupiedError
from fleetlight.ps.rendezvous.enrolment import Enrolment, SurplusError
from fleetlight.ps.rendezvous.scheduler import RendezvousScheduler
from fleetlight.ps.rendezvous.service import JobSize, RendezvousService, WithRendezvous
from fleetlight.ps.transport.channel import SocketChannel
from fleetlight.ps.transport.interface import Connection, MemoryChannel, Reply

# Members meet, wait for each other, and learn who is missing or has failed.


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


# The directory knows the newest process of each server, and refuses older ones.


def known(incarnation: int, process: str, server: int = 0) -> list[ServerEntry]:
    """What a worker reports."""
    return [ServerEntry(server, incarnation, process, "10.0.0.1", 9)]


def said(server: int = 0, incarnation: int = 0, port: int = 7000) -> Announce:
    return Announce(server, incarnation, "10.0.0.1", port)


def test_servers_are_listed_in_the_order_of_their_indices() -> None:
    directory = Directory(2)
    assert directory.missing() == [0, 1]
    directory.announce("b", said(1, port=7001), 0.0)
    assert directory.missing() == [0]
    directory.announce("a", said(0), 0.0)
    assert directory.entries() == [
        ServerEntry(0, 1, "a", "10.0.0.1", 7000),
        ServerEntry(1, 1, "b", "10.0.0.1", 7001),
    ]


def test_the_same_process_keeps_its_incarnation() -> None:
    directory = Directory(1)
    # a reply was lost, so the process still says 0
    assert [directory.announce("a", said(), now) for now in (0.0, 1.0)] == [1, 1]
    assert directory.announce("a", said(incarnation=1), 2.0) == 1


def test_a_process_replaces_one_whose_connection_has_ended() -> None:
    directory = Directory(1)
    directory.announce("a", said(), 0.0)
    directory.lose("a")
    assert directory.announce("b", said(port=8000), 0.1) == 2
    assert directory.entries() == [ServerEntry(0, 2, "b", "10.0.0.1", 8000)]


def test_a_process_waits_while_another_one_may_run() -> None:
    directory = Directory(1)
    directory.announce("a", said(), 0.0)
    with pytest.raises(OccupiedError):
        directory.announce("b", said(port=8000), SILENCE_S)
    text = directory.occupied_text(said(port=8000), 3.0)
    assert "two servers 0: one listens at 10.0.0.1:7000 and announced itself 3.0 s ago" in text
    assert directory.announce("b", said(port=8000), SILENCE_S + 0.1) == 2


def test_a_process_that_wakes_up_after_its_successor_is_refused() -> None:
    directory = Directory(1)
    directory.announce("a", said(), 0.0)
    directory.announce("b", said(port=8000), SILENCE_S + 1)
    with pytest.raises(MembershipError, match=r"incarnation 1, is older than incarnation 2, which"):
        directory.announce("a", said(incarnation=1), SILENCE_S + 2)


def test_two_processes_with_one_incarnation_are_refused() -> None:
    directory = Directory(1)
    directory.announce("a", said(incarnation=3), 0.0)
    with pytest.raises(MembershipError, match="has the same number as incarnation 3"):
        directory.announce("b", said(incarnation=3), SILENCE_S + 1)


def test_an_index_beyond_the_job_is_refused() -> None:
    with pytest.raises(MembershipError, match="announces index 2, expected 0 to 1"):
        Directory(2).announce("a", said(2), 0.0)


def test_servers_teach_a_directory_without_memory() -> None:
    directory = Directory(1)
    # the older one comes first
    assert directory.announce("a", said(incarnation=1), 0.0) == 1
    assert directory.announce("b", said(incarnation=2), 0.0) == 2
    with pytest.raises(MembershipError):
        directory.announce("a", said(incarnation=1), 0.0)


def test_workers_teach_a_directory_without_memory() -> None:
    newcomer = Directory(1)
    # workers know incarnation 3, so a process that was started after it gets a higher number
    assert newcomer.announce("d", said(), 0.0) == 1
    newcomer.learn(known(3, "c"))
    assert newcomer.announce("d", said(incarnation=1), 1.0) == 4
    survivor = Directory(1)
    survivor.learn(known(3, "c"))
    assert survivor.announce("c", said(incarnation=3), 0.0) == 3
    stale = Directory(1)
    stale.announce("a", said(incarnation=2), 0.0)
    stale.learn(known(3, "c") + known(1, "x", server=9))
    assert stale.missing() == [0]
    with pytest.raises(MembershipError, match="is older than incarnation 3; end this process"):
        stale.announce("a", said(incarnation=2), 0.0)


def test_the_job_is_over_when_all_servers_have_left() -> None:
    directory = Directory(2)
    directory.depart(0)
    assert not directory.is_over
    directory.depart(1)
    assert directory.is_over


def test_a_number_that_a_predecessor_had_is_given_once() -> None:
    directory = Directory(1)
    assert directory.announce("b", said(), 0.0) == 1
    # before the directory lost its memory, another process had this number
    directory.learn(known(1, "a"))
    assert directory.entries()[0].incarnation == 2
    directory.learn(known(2, "b"))
    assert directory.entries()[0].incarnation == 2


def test_an_owner_of_buckets_has_an_incarnation() -> None:
    directory = Directory(2)
    directory.announce("a", Announce(0, 0, "h", 1, [(0, 10)]), 0.0)
    directory.announce("b", Announce(1, 0, "h", 2, [(10, 16)]), 0.0)
    directory.lose("b")
    directory.announce("c", Announce(1, 0, "h", 3, [(10, 16)]), 1.0)
    owners = [(one.buckets, one.server, one.incarnation) for one in directory.entries()]
    assert owners == [([(0, 10)], 0, 1), ([(10, 16)], 1, 2)]


def test_no_two_servers_own_a_bucket() -> None:
    directory = Directory(2)
    directory.announce("a", Announce(0, 0, "h", 1, [(0, 10)]), 0.0)
    text = "announces buckets 8 to 15, but server 0 stores 0 to 9"
    with pytest.raises(MembershipError, match=text):
        directory.announce("b", Announce(1, 0, "h", 2, [(8, 16)]), 0.0)


# Members get their indices when the last one has arrived; a later process replaces one.


def complete(*addresses: str) -> Enrolment:
    enrolment = Enrolment("worker", len(addresses))
    for number, address in enumerate(addresses):
        enrolment.arrive(f"process {number}", hello(address=address))
    return enrolment


def test_indices_and_places_follow_the_hosts() -> None:
    enrolment = complete("10.0.0.1", "10.0.0.2", "10.0.0.1")
    assert enrolment.is_complete
    # members of one host get consecutive indices
    answers = [enrolment.answer(f"process {number}") for number in range(3)]
    assert [answer.index for answer in answers] == [0, 2, 1]
    places = [
        (a.place.local_rank, a.place.local_size, a.place.node_rank, a.place.node_num)
        for a in answers
    ]
    assert places == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)]


def test_members_keep_the_indices_that_they_bring() -> None:
    enrolment = Enrolment("server", 2)
    enrolment.arrive("a", hello("server", index=1))
    assert not enrolment.is_complete
    enrolment.arrive("a", hello("server", index=1))
    enrolment.arrive("b", hello("server", node_id="0"))
    assert (enrolment.answer("a").index, enrolment.answer("b").index) == (1, 0)


def test_two_processes_with_one_index_are_refused() -> None:
    enrolment = Enrolment("worker", 2)
    enrolment.arrive("a", hello(index=0))
    with pytest.raises(MembershipError, match="two workers say they are worker 0"):
        enrolment.arrive("b", hello(index=0))
    enrolment.arrive("c", hello(index=1))
    assert enrolment.is_complete


def test_a_process_that_ends_early_makes_room() -> None:
    enrolment = Enrolment("worker", 2)
    enrolment.arrive("a", hello(index=0))
    enrolment.arrive("b", hello())
    assert enrolment.is_complete
    other = Enrolment("worker", 2)
    for process, who in (("a", hello(index=0)), ("b", hello())):
        other.arrive(process, who)
        other.lose(process)
        if process == "a":
            # its successor brings the same index
            other.arrive("a2", hello(index=0))
            other.lose("a2")
    assert other.answer("a2").index == 0


def test_a_process_without_an_index_is_forgotten_when_it_ends() -> None:
    enrolment = Enrolment("worker", 2)
    enrolment.arrive("a", hello())
    enrolment.lose("a")
    enrolment.arrive("b", hello())
    assert enrolment.progress() == "1 of 2 workers joined"


def test_a_restarted_process_takes_the_index_of_its_predecessor() -> None:
    enrolment = complete("10.0.0.1", "10.0.0.2")
    enrolment.arrive("new", hello(index=1, address="10.0.0.1"))
    assert enrolment.answer("new").index == 1
    assert enrolment.answer("new").place.local_rank == 1
    with pytest.raises(MembershipError, match="another process has replaced this worker"):
        enrolment.answer("process 1")


def test_a_process_without_an_index_takes_a_vacant_one() -> None:
    enrolment = complete("10.0.0.1", "10.0.0.2")
    with pytest.raises(SurplusError):
        enrolment.arrive("new", hello())
    enrolment.arrive("new", hello(), vacant=[1])
    assert enrolment.answer("new").index == 1
    with pytest.raises(SurplusError):
        enrolment.arrive("other", hello(index=2))
    assert enrolment.surplus_text().startswith("the job already has its 2 workers; end this")


def test_missing_members_are_named() -> None:
    enrolment = Enrolment("server", 2)
    enrolment.arrive("a", hello("server"))
    text = enrolment.missing_text(3.0)
    assert text.startswith(
        "1 of 2 servers joined within 3 s, 1 missing. Here: pid 7 on h (10.0.0.1)"
    )


# RendezvousScheduler: what its log says of a job.


def test_a_short_job_has_formed_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forms and ends before the scheduler looks for the first time."""
    monkeypatch.setattr(logger, "propagate", True)
    holder, port = reserved_port()
    with holder, caplog.at_level("INFO", logger.name):
        scheduler = RendezvousScheduler(("127.0.0.1", port), JobSize(VERSION, "job", 1, 1), LIMIT_S)
        point = scheduler._point
        server = client_of(point, "s", hello("server", 0)).channel(LIMIT_S)
        server.call(m.Announce(0, 0, "10.0.0.1", 7000))
        client_of(point, "w").enrol()
        server.call(m.Depart(0))
        assert scheduler.run() == 0
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-2:] == ["cluster formed: 1 worker and 1 server", "all servers have left"]
