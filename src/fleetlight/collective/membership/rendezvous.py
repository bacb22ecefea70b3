# SPDX-License-Identifier: Apache-2.0
"""The rendezvous: a TCPStore of torch that one member serves and the others join.

The listening socket is opened here and passed to torch. So it listens on one chosen address only,
and an error names a port that is taken.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from fleetlight.collective.membership.diagnosis import first_sentence
from fleetlight.errors import DeadlineError, FleetError, MembershipError, PeerLostError
from fleetlight.observe.log import logger
from fleetlight.roles.address import resolve
from fleetlight.roles.members import MemberHello, decode, missing_text
from fleetlight.roles.role import Endpoint
from fleetlight.security.context import Contexts
from fleetlight.torch_compat.c10d import Store, TCPStore
from fleetlight.wire.descriptors import bounded_connections
from fleetlight.wire.listening import bound, listen_at, ways_to
from fleetlight.wire.tls import TlsWire
from fleetlight.wire.tunnel import Tunnel, entrance_to, exit_at

#: how long the store may take for a reply that needs no wait
REPLY_S = 5.0
#: how often a TLS handshake is tried that takes longer
_HANDSHAKES = 3
_LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
_REPORT_EVERY_S = 3.0
#: the key of the number of workers that have read all hellos
_GATHERED = "hellos gathered"


#: tunnels that carry the store inside TLS, as long as this process may use it
_tunnels: list[Tunnel] = []


class RendezvousDeadline:
    """A deadline that logs every few seconds what it waits for."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._report_at = time.monotonic() + _REPORT_EVERY_S

    def left(self) -> timedelta:
        """The time left, at least a moment."""
        return timedelta(seconds=max(0.1, self._end - time.monotonic()))

    def wait(self, waiting_for: Callable[[], str]) -> bool:
        """Pause a moment; False after the deadline."""
        now = time.monotonic()
        if now >= self._end:
            return False
        if now >= self._report_at:
            logger.warning("%s", waiting_for())
            self._report_at = now + _REPORT_EVERY_S
        time.sleep(min(_POLL_S, self._end - now))
        return True


def serve(endpoint: Endpoint, deadline: RendezvousDeadline, tls: Contexts | None = None) -> Store:
    """Serve the store at an address of this machine; with `tls`, at the end of a tunnel."""
    listener, host = listen_at(endpoint)
    if tls is not None:
        outside, (listener, host) = listener, (bound(_LOOPBACK, 0), _LOOPBACK)
        store_endpoint = listener.getsockname()[:2]
        _tunnels.append(exit_at(outside, store_endpoint, tls.as_server, logger.warning))
    port = listener.getsockname()[1]
    with bounded_connections(REPLY_S):
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=deadline.left(),
            master_listen_fd=listener.detach(),
        )


def join(
    endpoint: Endpoint, deadline: RendezvousDeadline, host_name: str, tls: Contexts | None = None
) -> Store:
    """Connect to the store that `host_name` serves, as soon as it listens."""
    host, port = endpoint
    while (way := next(filter(_is_reachable, ways_to(endpoint)), None)) is None:
        if not deadline.wait(lambda: f"not ready endpoints: ['{host}:{port}'] ({host_name})"):
            if resolve(host) is None:
                raise MembershipError(
                    f"the name {host!r}, the address of {host_name}, cannot be resolved on "
                    "this machine; give the address, or a name that every machine knows"
                )
            raise MembershipError(
                f"{host_name} did not listen at {host}:{port} within "
                f"{deadline.deadline_s:g} s; is it started, and is the address reachable from here?"
            )
    if tls is not None:
        way = _through_tunnel(way, tls, host_name, deadline)
    try:
        with bounded_connections(REPLY_S):
            return TCPStore(*way, wait_for_workers=False, timeout=deadline.left())
    except (RuntimeError, dist.DistStoreError) as error:
        raise MembershipError(
            f"what listens at {host}:{port} is not {host_name} of this job: {first_sentence(error)}"
        ) from None


def _through_tunnel(
    way: Endpoint, tls: Contexts, host_name: str, deadline: RendezvousDeadline
) -> Endpoint:
    """The entrance of a tunnel to the store, once a TLS handshake has succeeded."""
    for tries_left in reversed(range(_HANDSHAKES)):
        try:
            with socket.create_connection(way, timeout=REPLY_S) as probe:
                TlsWire(probe, host_name).handshake(tls.as_client, REPLY_S, way[0])
            break
        except (TimeoutError, DeadlineError) as error:
            # a busy host replies later
            if not tries_left or not deadline.wait(lambda: f"no TLS handshake with {host_name}"):
                raise DeadlineError(
                    f"no TLS handshake with {host_name} at {way[0]}:{way[1]}: {error}"
                ) from None
    _tunnels.append(entrance_to(way, tls.as_client, logger.warning))
    return _tunnels[-1].address


def close_tunnels() -> None:
    """Close the tunnels of this process, after its last use of the store."""
    while _tunnels:
        _tunnels.pop().close()


def gather(
    store: Store, size: int, endpoints: Sequence[str], deadline: RendezvousDeadline
) -> dict[int, MemberHello]:
    """Wait for the hello of every worker."""
    here: dict[int, MemberHello] = {}
    while len(here) < size:
        with store_errors():
            came = [i for i in range(size) if i not in here and store.check([f"hello/{i}"])]
            for index in came:
                here[index] = decode(store.get(f"hello/{index}"))
        text = missing_text(size, here, endpoints, deadline.deadline_s)
        if len(here) < size and not deadline.wait(lambda: _not_ready(size, here, endpoints)):
            raise MembershipError(text)
    with store_errors():
        store.add(_GATHERED, 1)
    return here


@contextlib.contextmanager
def kept_for_readers(store: Store, size: int) -> Iterator[None]:
    """Delay an error until all workers have gathered: it may end the process that serves the store.

    So each worker finds the same error itself, and none reports a lost store.
    """
    try:
        yield
    except FleetError:
        last = time.monotonic() + REPLY_S
        with contextlib.suppress(RuntimeError, dist.DistError):
            while 0 < store.add(_GATHERED, 0) < size and time.monotonic() < last:
                time.sleep(_POLL_S)
        raise


def cloned(store: Store) -> Store:
    """A second connection to the same store, for another thread."""
    with bounded_connections(REPLY_S):
        copy: Store = store.clone()  # type: ignore[attr-defined]
    return copy


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise errors of Fleetlight where the store is gone or too slow."""
    try:
        yield
    except dist.DistNetworkError as error:
        text = first_sentence(error)
        raise PeerLostError(f"the rendezvous store of the job was lost: {text}") from None
    except dist.DistStoreError as error:
        text = first_sentence(error)
        raise DeadlineError(f"the rendezvous store of the job does not reply: {text}") from None


def _not_ready(size: int, here: dict[int, MemberHello], endpoints: Sequence[str]) -> str:
    waiting = [i for i in range(size) if i not in here]
    names = [endpoints[i] if i < len(endpoints) else f"worker {i}" for i in waiting]
    return f"not ready endpoints: {names}"


def _is_reachable(endpoint: Endpoint) -> bool:
    # a ValueError is a name that no resolver takes
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection(endpoint, timeout=1.0),
    ):
        return True
    return False
