# SPDX-License-Identifier: Apache-2.0
"""torch's store and rendezvous between launchers; only this file of the launcher uses torch.

torch is imported inside functions, since a job of one machine does not need it.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import socket
from typing import Any, cast

from fleetlight.errors import LaunchError, MembershipError
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines.rendezvous_state import JsonBackend
from fleetlight.launch.machines.store_connection import (
    STORE_DEADLINE_S,
    Retry,
    StoreConnection,
    StoreGoneError,
    StoreLostError,
    bounded,
)
from fleetlight.launch.processes import ports
from fleetlight.roles.address import is_own
from fleetlight.roles.role import Endpoint
from fleetlight.security.context import client_context, server_context
from fleetlight.wire import tunnel

#: the least time that a listening launcher gets to reply, whatever is left of --deadline_s
_MIN_REPLY_S = 1.0
#: with MIN:MAX machines, how long to wait for more once MIN have joined
LAST_CALL_S = 5.0
#: a key of all jobs; jobs differ by the master's port
_RUN = "fleetrun"
#: the key of a random number that identifies the store
_IDENTITY = "store"
_LOOPBACK = "127.0.0.1"
#: a handler's destructor joins its heartbeat thread, which may hang on a dead connection;
#: tunnels must last as long as the launcher
_NEVER_COLLECTED: list[object] = []


class Store:
    """The non-blocking operations of torch's store, each with a deadline."""

    def __init__(self, link: StoreConnection, prefix: str = "") -> None:
        self._link, self._prefix = link, prefix

    @property
    def raw(self) -> Any:
        """torch's store."""
        return self._link.raw

    def prefixed(self, name: str) -> Store:
        """A view of the store whose keys start with `name`."""
        return Store(self._link, f"{self._prefix}{name}/")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._link.call(lambda raw: raw.add(self._prefix + key, amount)))

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._link.call(lambda raw: raw.set(self._prefix + key, value))

    def check(self, keys: list[str]) -> bool:
        """True when all keys are written."""
        there = [self._prefix + key for key in keys]
        return bool(self._link.call(lambda raw: raw.check(there)))

    def get(self, key: str) -> bytes:
        """Read a written value."""
        return bytes(self._link.call(lambda raw: raw.get(self._prefix + key)))


def quiet_torch() -> None:
    """Silence torch's logs of lost connections, which the launcher reports in one line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # processes use another store, which worker 0 serves
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def serve(spec: RendezvousSpec) -> Store | None:
    """Serve the store at the master's address only; None if the port is taken."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = spec.master
    listener = ports.listen(host, port)
    if listener is None:
        return None
    if spec.ssl is not None:
        outside, listener = listener, socket.create_server((_LOOPBACK, 0))
        host, port = listener.getsockname()
        _NEVER_COLLECTED.append(
            tunnel.exit_at(outside, (host, port), server_context(spec.ssl), _warn)
        )
    served = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=STORE_DEADLINE_S),
        master_listen_fd=listener.detach(),
    )
    served.set(_IDENTITY, secrets.token_hex(8))
    return Store(StoreConnection(served))


def _warn(text: str) -> None:
    logging.getLogger("fleetlight").warning("%s", text)


def is_served(spec: RendezvousSpec) -> bool:
    """True when a process listens at the master's address."""
    try:
        with socket.create_connection(spec.master, timeout=1.0):
            return True
    except OSError:
        return False


def connect(
    spec: RendezvousSpec, left_s: float = STORE_DEADLINE_S, retry: Retry | None = None
) -> Store:
    """Connect to the store of another machine within `left_s`.

    With `retry`, a connection that fails later is replaced.
    """
    import torch.distributed  # noqa: F401  # the import takes seconds, which must not count

    host, port = _client_endpoint(spec)
    deadline_s = min(STORE_DEADLINE_S, max(_MIN_REPLY_S, left_s))
    try:
        raw, identity = bounded(lambda: _client(host, port, deadline_s), deadline_s)
    except RuntimeError as error:
        host, port = spec.master
        listener = ports.listener(port) if is_own(host) else ""
        but = f" but {listener}" if listener else ""
        raise LaunchError(
            f"the process at {host}:{port} is not a fleetrun{but}: {error}; end it, or choose "
            "another port for all machines (--master host:port, or --start_port with --ips)"
        ) from None
    return Store(StoreConnection(raw, lambda: _reconnect(spec, (host, port), identity), retry))


def _client_endpoint(spec: RendezvousSpec) -> Endpoint:
    """The address for torch's client: the master's, or that of a TLS tunnel to it."""
    if spec.ssl is None:
        return spec.master
    entrance = tunnel.entrance_to(spec.master, client_context(spec.ssl), _warn)
    _NEVER_COLLECTED.append(entrance)
    return entrance.address


def _reconnect(spec: RendezvousSpec, endpoint: Endpoint, identity: bytes) -> Any:
    """A new connection to the same store."""
    try:
        socket.create_connection(spec.master, timeout=1.0).close()
    except ConnectionRefusedError as error:
        raise StoreGoneError("no process listens at the store's address") from error
    except OSError as error:
        raise StoreLostError(f"the store is unreachable: {error}") from error
    raw, found = bounded(lambda: _client(*endpoint, STORE_DEADLINE_S))
    if found != identity:
        raise StoreGoneError("another store has taken its place")
    return raw


def _client(host: str, port: int, deadline_s: float) -> tuple[Any, bytes]:
    """torch's client, and the identity of its store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=deadline_s)
    raw = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return raw, bytes(raw.get(_IDENTITY))


class Rendezvous:
    """torch's dynamic rendezvous: in each round, machines may join or leave."""

    def __init__(self, store: Store, spec: RendezvousSpec, host: str, deadline_s: float) -> None:
        from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

        seconds = datetime.timedelta
        logging.getLogger(dynamic.__name__).disabled = True
        plain = JsonBackend(c10d.C10dRendezvousBackend(store.raw, _RUN), dynamic)
        self._backend = plain
        self._handler = dynamic.DynamicRendezvousHandler.from_backend(
            run_id=_RUN,
            store=store.raw,
            backend=cast("dynamic.RendezvousBackend", plain),
            min_nodes=spec.min_nodes,
            max_nodes=spec.max_nodes,
            local_addr=host,
            timeout=dynamic.RendezvousTimeout(
                join=seconds(seconds=deadline_s), last_call=seconds(seconds=LAST_CALL_S)
            ),
        )
        _NEVER_COLLECTED.append(self._handler)

    def next_round(self) -> tuple[str, int, int]:
        """Block until the machines have joined; return the round's name, a number and the size."""
        from torch.distributed.elastic.rendezvous import api

        try:
            joined = self._handler.next_rendezvous()
        except api.RendezvousTimeoutError as error:
            raise MembershipError(str(error)) from None
        except (api.RendezvousClosedError, api.RendezvousGracefulExitError):
            raise MembershipError("the job ended before this machine joined") from None
        except api.RendezvousConnectionError as error:
            raise MembershipError(f"the store of node 0 was lost: {error.__cause__}") from None
        except api.RendezvousStateError as error:
            raise MembershipError(str(error)) from None
        return f"round.{self._backend.round}", joined.rank, joined.world_size

    def waiting(self) -> int:
        """The number of machines that wait to join."""
        from torch.distributed.elastic.rendezvous import api

        try:
            return int(bounded(self._handler.num_nodes_waiting))
        except api.RendezvousError as error:
            raise StoreLostError(str(error)) from None

    def close(self) -> None:
        """Let no more machines join."""
        bounded(self._handler.shutdown)
