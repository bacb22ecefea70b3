# SPDX-License-Identifier: Apache-2.0
"""A server stays findable: it announces itself until it is refused or leaves."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.ps.rendezvous.members import LIMIT_S, client_of, hello, service_of
from tests.workers import reserved_port

from fleetlight.errors import MembershipError, PeerError, PeerLostError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.rendezvous import client as clients
from fleetlight.ps.rendezvous.addresses import AnnouncedAddresses, FixedAddresses
from fleetlight.ps.rendezvous.client import Announcer, RendezvousClient
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.dialing import NotReadyError
from fleetlight.ps.transport.interface import Channel, MemoryChannel
from fleetlight.ps.transport.listener import Listener
from fleetlight.roles.role import Endpoint


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "ANNOUNCE_EVERY_S", 0.05)


def stored_by(server: int) -> range:
    """The buckets of a server in a job with one."""
    return range(4)


def caller(endpoint: Endpoint, process: str, kind: str = "server") -> RendezvousClient:
    """A member that reaches the rendezvous by a socket."""

    def connect(attend: m.Attend, within_s: float) -> Channel:
        channel = SocketChannel(
            lambda: endpoint, "the rendezvous", deadline_s=LIMIT_S, greeting=lambda: attend
        )
        connect_all([channel], within_s)
        return channel

    index = 0 if kind == "server" else None
    attend = m.Attend("job", 1, 1, process, hello(kind, index))
    return RendezvousClient(connect, attend, LIMIT_S)


def test_a_server_announces_itself_to_a_rendezvous_that_was_restarted() -> None:
    holder, port = reserved_port()
    listener = Listener(("127.0.0.1", port), service_of())
    announcer = Announcer(
        caller(listener.address, "s"), 0, ("10.0.0.1", 7000), lambda error: None, range(4)
    )
    announcer.start(LIMIT_S)
    addresses = AnnouncedAddresses(caller(listener.address, "w", "worker"), stored_by)
    assert addresses.wait_for_all() == (("10.0.0.1", 7000),)
    listener.stop()
    # the last answer holds while the rendezvous is away
    assert addresses.of(0) == ("10.0.0.1", 7000)
    point = service_of()
    again = Listener(listener.address, point)
    assert caller(listener.address, "w2", "worker").locate().servers[0].incarnation == 1
    announcer.stop()
    assert point.wait_for_end(LIMIT_S)
    assert not point.failure
    again.stop()
    holder.close()


def test_a_replaced_server_is_told() -> None:
    point, refused, told = service_of(), list[PeerError](), threading.Event()

    def note(error: PeerError) -> None:
        refused.append(error)
        told.set()

    announcer = Announcer(
        client_of(point, "s", hello("server", 0)), 0, ("10.0.0.1", 7000), note, range(4)
    )
    announcer.start(LIMIT_S)
    point.fail("worker 0 failed: on purpose")
    assert told.wait(LIMIT_S)
    assert str(refused[0]) == "worker 0 failed: on purpose"
    announcer.stop()


def test_workers_follow_a_server_to_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.rendezvous.addresses._HOLDS_S", -1.0)
    point = service_of()
    old = Announcer(
        client_of(point, "old", hello("server", 0)), 0, ("10.0.0.1", 7), print, range(4)
    )
    old.start(LIMIT_S)
    addresses = AnnouncedAddresses(client_of(point, "w"), stored_by)
    assert addresses.wait_for_all() == (("10.0.0.1", 7),)
    assert addresses.of(0) == ("10.0.0.1", 7)
    point._directory.lose("old")
    new = Announcer(
        client_of(point, "new", hello("server", 0)), 0, ("10.0.0.2", 8), print, range(4)
    )
    new.start(LIMIT_S)
    assert addresses.of(0) == ("10.0.0.2", 8)
    for announcer in (old, new):
        announcer.stop()


def test_answers_are_shared_for_a_moment() -> None:
    asked: list[object] = []

    def never(attend: m.Attend, within_s: float) -> Channel:
        raise AssertionError

    class Counting(RendezvousClient):
        """Counts its questions."""

        def locate(self, known: object = (), within_s: float | None = None) -> m.Located:
            asked.append(known)
            return m.Located([m.ServerEntry(0, 1, "s", "10.0.0.1", 7, [(0, 4)])])

    attend = m.Attend("", 1, 1, "w", hello())
    addresses = AnnouncedAddresses(Counting(never, attend, 1.0), stored_by)
    addresses.wait_for_all()
    for _ in range(5):
        addresses.of(0)
    assert len(asked) == 1


def test_an_address_that_nobody_announces_is_not_ready() -> None:
    def away(attend: m.Attend, within_s: float) -> Channel:
        raise PeerLostError("away")

    attend = m.Attend("", 1, 1, "w", hello())
    addresses = AnnouncedAddresses(RendezvousClient(away, attend, 1.0), stored_by)
    with pytest.raises(NotReadyError, match="away"):
        addresses.of(0)
    point = service_of()
    point.fail("server 1 failed: on purpose")
    with pytest.raises(MembershipError, match="on purpose"):
        AnnouncedAddresses(client_of(point, "w"), stored_by).of(0)


def test_a_server_that_stores_other_rows_is_refused() -> None:
    point = service_of()
    channel = client_of(point, "s", hello("server", 0)).channel(LIMIT_S)
    channel.call(m.Announce(0, 0, "10.0.0.1", 7001, [(0, 3)]))
    addresses = AnnouncedAddresses(client_of(point, "w"), stored_by)
    with pytest.raises(MembershipError, match=r"stores the buckets \[\(0, 3\)\].*expects 0 to 3"):
        addresses.of(0)


def test_fixed_addresses_stay() -> None:
    assert FixedAddresses([("a", 1), ("b", 2)]).of(1) == ("b", 2)


def test_a_worker_that_reconnects_does_not_wait_for_other_servers() -> None:
    point = service_of(servers=2)
    addresses = AnnouncedAddresses(
        client_of(point, "w", size=(1, 2)), lambda server: range(server, server + 1)
    )
    channel = client_of(point, "s", hello("server", 1), (1, 2)).channel(LIMIT_S)
    channel.call(m.Announce(1, 0, "10.0.0.1", 7001, [(1, 2)]))
    assert addresses.of(1) == ("10.0.0.1", 7001)
    with pytest.raises(NotReadyError, match="server 0 has not announced where it listens"):
        addresses.of(0)
    assert not point.failure


def test_members_ask_again_when_the_rendezvous_restarts_meanwhile() -> None:
    holder, port = reserved_port()
    listener = Listener(("127.0.0.1", port), service_of())
    with holder, ThreadPoolExecutor(1) as pool:
        located = pool.submit(caller(listener.address, "w", "worker").locate)
        while not listener._sessions:
            threading.Event().wait(0.01)
        listener.stop()
        again = Listener(listener.address, service_of())
        announcer = Announcer(caller(listener.address, "s"), 0, ("10.0.0.1", 7000), print, range(4))
        announcer.start(LIMIT_S)
        assert located.result().servers[0].port == 7000
        announcer.stop()
        again.stop()


def test_a_server_survives_a_rendezvous_of_another_job() -> None:
    points = [service_of()]
    asked = threading.Event()

    def connect(attend: m.Attend, within_s: float) -> Channel:
        if len(points) > 1:
            asked.set()
            raise ProtocolError("another program listens there")
        channel = MemoryChannel(points[0])
        channel.call(attend)
        return channel

    attend = m.Attend("job", 1, 1, "s", hello("server", 0))
    client = RendezvousClient(connect, attend, LIMIT_S)
    announcer = Announcer(client, 0, ("10.0.0.1", 7000), print, range(4))
    announcer.start(LIMIT_S)
    points.append(service_of())
    assert announcer._channel is not None
    announcer._channel.call = lambda *_, **__: (_ for _ in ()).throw(PeerLostError("gone"))  # type: ignore[method-assign]
    assert asked.wait(LIMIT_S)
    asked.clear()
    # it tries again, and its thread runs on
    assert asked.wait(LIMIT_S)
    announcer.stop()
