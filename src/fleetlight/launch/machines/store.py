# SPDX-License-Identifier: Apache-2.0
"""torch's store and rendezvous between launchers: the only file of the launcher that uses torch.

torch is imported inside the functions, since a job of one machine has no use for it.
"""

from __future__ import annotations

import datetime
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from fleetlight.errors import LaunchError, MembershipError
from fleetlight.launch.job.spec import Meeting
from fleetlight.launch.machines.rounds import PlainBackend
from fleetlight.launch.processes import ports

#: no answer of the store takes longer, unless its machine is gone
STORE_DEADLINE_S = 8.0
#: a launcher that listens gets this long to answer, however little is left of --deadline_s
_LEAST_S = 1.0
#: with MIN:MAX machines, how long to wait for more once MIN are there
LAST_CALL_S = 5.0
#: a key all launchers of a job use; the master's port is what tells jobs apart
_RUN = "fleetrun"
#: Collecting a handler joins its heartbeat thread, which may hang on a dead connection: never done.
_KEPT: list[object] = []

_T = TypeVar("_T")


class StoreLostError(RuntimeError):
    """The store did not answer."""


def bounded(work: Callable[[], _T], deadline_s: float = STORE_DEADLINE_S) -> _T:
    """Do something that may hang, in a thread that is left behind if it does.

    torch's store waits for a reply without end when a cable is cut: nobody closes the connection.
    """
    done: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except Exception as error:  # raised again below
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = done.get(timeout=deadline_s)
    except queue.Empty:
        raise StoreLostError(f"the store did not answer for {deadline_s:.3g} s") from None
    if error is not None:
        raise error
    return cast("_T", value)


class Store:
    """The part of torch's store that answers at once, with an end to every wait."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return int(bounded(lambda: self.raw.add(key, amount)))

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        bounded(lambda: self.raw.set(key, value))

    def check(self, keys: list[str]) -> bool:
        """True when all keys have been written."""
        return bool(bounded(lambda: self.raw.check(keys)))

    def get(self, key: str) -> bytes:
        """Read a value that has been written."""
        return bytes(bounded(lambda: self.raw.get(key)))


def quiet_torch() -> None:
    """torch reports lost connections at length; the launcher names the machine in one line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # Children get a store of their own, served by worker 0.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def serve(meeting: Meeting) -> Store | None:
    """The store, served here on the master's address only; None when the port is taken."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = meeting.master
    listener = ports.listen(host, port)
    if listener is None:
        return None
    served = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=STORE_DEADLINE_S),
        master_listen_fd=listener.detach(),
    )
    return Store(served)


def is_served(meeting: Meeting) -> bool:
    """True when something listens where the master should."""
    try:
        with socket.create_connection(meeting.master, timeout=1.0):
            return True
    except OSError:
        return False


def connect(meeting: Meeting, left_s: float = STORE_DEADLINE_S) -> Store:
    """The store of another machine, when it answers within `left_s`."""
    import torch.distributed  # noqa: F401  # takes seconds, which are not the store's

    host, port = meeting.master
    deadline_s = min(STORE_DEADLINE_S, max(_LEAST_S, left_s))
    try:
        return Store(bounded(lambda: _client(host, port, deadline_s), deadline_s))
    except RuntimeError as error:
        listener = ports.listener(port) if ports.is_own(host) else ""
        but = f" but {listener}" if listener else ""
        raise LaunchError(
            f"what answers at {host}:{port} is not a fleetrun{but}: {error}; end it, or choose "
            "another port for all machines (--master host:port, or --start_port with --ips)"
        ) from None


def _client(host: str, port: int, deadline_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=deadline_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


class Rendezvous:
    """torch's dynamic rendezvous: rounds of machines that come, stay and go."""

    def __init__(self, store: Store, meeting: Meeting, host: str, deadline_s: float) -> None:
        from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

        seconds = datetime.timedelta
        logging.getLogger(dynamic.__name__).disabled = True
        plain = PlainBackend(c10d.C10dRendezvousBackend(store.raw, _RUN), dynamic)
        self._handler = dynamic.DynamicRendezvousHandler.from_backend(
            run_id=_RUN,
            store=store.raw,
            backend=cast("dynamic.RendezvousBackend", plain),
            min_nodes=meeting.min_nodes,
            max_nodes=meeting.max_nodes,
            local_addr=host,
            timeout=dynamic.RendezvousTimeout(
                join=seconds(seconds=deadline_s), last_call=seconds(seconds=LAST_CALL_S)
            ),
        )
        _KEPT.append(self._handler)

    def next_round(self) -> tuple[Store, int, int]:
        """Blocks until the machines are there: the round's store, a number and how many."""
        from torch.distributed.elastic.rendezvous import api

        try:
            met = self._handler.next_rendezvous()
        except api.RendezvousTimeoutError as error:
            raise MembershipError(str(error)) from None
        except (api.RendezvousClosedError, api.RendezvousGracefulExitError):
            raise MembershipError("the job has ended without this machine") from None
        except api.RendezvousConnectionError as error:
            raise MembershipError(f"the store of node 0 went away: {error.__cause__}") from None
        except api.RendezvousStateError as error:
            raise MembershipError(str(error)) from None
        return Store(met.store), met.rank, met.world_size

    def waiting(self) -> int:
        """How many machines would like to join."""
        from torch.distributed.elastic.rendezvous import api

        try:
            return int(bounded(self._handler.num_nodes_waiting))
        except api.RendezvousError as error:
            raise StoreLostError(str(error)) from None

    def close(self) -> None:
        """Nobody may join any more."""
        bounded(self._handler.shutdown)
