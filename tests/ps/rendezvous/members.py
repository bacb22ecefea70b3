# SPDX-License-Identifier: Apache-2.0
"""Members that call a rendezvous in the same process."""

import contextlib
from collections.abc import Iterator

from fleetlight.ps import messages as m
from fleetlight.ps.rendezvous.client import RendezvousClient
from fleetlight.ps.rendezvous.service import JobSize, RendezvousService
from fleetlight.ps.transport.interface import Channel, MemoryChannel
from fleetlight.ps.transport.listener import Listener
from fleetlight.roles.members import MemberHello

VERSION = "test"
LIMIT_S = 20.0


def hello(
    kind: str = "worker", index: int | None = None, address: str = "10.0.0.1", node_id: str = ""
) -> MemberHello:
    """A member on some host."""
    return MemberHello(
        kind=kind,
        index=index,
        address=address,
        hostname="h",
        pid=7,
        node_id=node_id or None,
        fleetlight=VERSION,
    )


def service_of(
    workers: int = 1, servers: int = 1, deadline_s: float = LIMIT_S
) -> RendezvousService:
    """The rendezvous of a job."""
    return RendezvousService(JobSize(VERSION, "job", workers, servers), deadline_s=deadline_s)


def client_of(
    point: RendezvousService,
    process: str,
    who: MemberHello | None = None,
    size: tuple[int, int] = (1, 1),
) -> RendezvousClient:
    """A member that calls the rendezvous without a network."""

    def connect(attend: m.Attend, within_s: float) -> Channel:
        channel = MemoryChannel(point)
        channel.call(attend)
        return channel

    attend = m.Attend("job", *size, process, hello() if who is None else who)
    return RendezvousClient(connect, attend, LIMIT_S)


@contextlib.contextmanager
def listening(point: RendezvousService) -> Iterator[Listener]:
    """The rendezvous behind a socket."""
    listener = Listener(("127.0.0.1", 0), point)
    try:
        yield listener
    finally:
        listener.stop()
